"""Cutting, masking, verifying."""
