"""Scenario 1 of the paper: prune in steps, fine-tuning after each."""
