"""Photographs: reading them, and matching their classes with the outputs of a model."""
