"""Repair without training: closed-form corrections, layer by layer."""
