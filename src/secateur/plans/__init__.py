"""Which groups leave: targets, limits, scores, ranking, plans."""

from secateur.plans.limits import Limits
from secateur.plans.targets import Target

__all__ = ["Limits", "Target"]
