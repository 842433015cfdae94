"""The pruning loop: prune, schedules, checkpoints, fine-tuning, comparison."""

from secateur.loop.finetune import FineTune
from secateur.loop.settings import Schedule

__all__ = ["FineTune", "Schedule"]
