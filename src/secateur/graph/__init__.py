"""What a model consists of: labels, groups of coupled units, cost."""
