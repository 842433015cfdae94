"""secateur prunes neural networks by explaining them."""

from secateur.errors import SecateurError
from secateur.graph.analysis import analyze
from secateur.graph.cost import Cost, measure
from secateur.graph.graph import Graph
from secateur.pruning.export import export
from secateur.pruning.files import load, save
from secateur.pruning.plan import Plan
from secateur.pruning.removal import apply
from secateur.pruning.targets import plan

__version__ = "0.1.0.dev0"

__all__ = ["Cost", "Graph", "Plan", "SecateurError", "analyze", "apply", "export", "load", "measure", "plan", "save"]
