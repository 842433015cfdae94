"""Scenario 2 of the paper: a few reference images, no fine-tuning."""
