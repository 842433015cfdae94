"""What a run recorded: history, curves."""
