"""Training with the original as teacher: losses, schedules, checkpoints, language models."""

from secateur.recover.loss import distillation_loss
from secateur.recover.recovery import recover
from secateur.recover.settings import Epoch, Recover, Recovered
from secateur.recover.text import write_text

__all__ = ["Epoch", "Recover", "Recovered", "distillation_loss", "recover", "write_text"]
