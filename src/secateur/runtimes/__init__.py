"""What runs a model, and how long each layer takes there."""

from secateur.runtimes.setup import Runtime, Setup
from secateur.runtimes.table import Latency, latency

__all__ = ["Latency", "Runtime", "Setup", "latency"]
