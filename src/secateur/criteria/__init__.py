"""Criteria: ways to score units, by name or as objects."""
