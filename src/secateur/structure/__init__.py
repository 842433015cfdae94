"""What a model consists of: axes, labels, groups of coupled units, cost."""
