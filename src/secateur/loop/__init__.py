"""The pruning loop: prune, schedules, checkpoints, comparison."""

from secateur.loop.settings import Schedule

__all__ = ["Schedule"]
