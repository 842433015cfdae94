"""What may leave: groups of coupled units, found by labels and tried out."""
