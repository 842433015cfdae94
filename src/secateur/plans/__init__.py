"""Which groups leave: targets, limits, scores, ranking, plans."""

from secateur.plans.targets import Limits, Target

__all__ = ["Limits", "Target"]
