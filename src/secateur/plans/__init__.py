"""Which groups leave: scores, ranking, plans."""
