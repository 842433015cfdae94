"""Repair: closed-form correction of a smaller model, so that its layers answer as the original's did."""
