"""secateur prunes neural networks by explaining them.

    graph → scores → plan → smaller model

`analyze` finds what may leave, `score` says what is needed for your data, `plan` chooses, `apply` removes and verifies;
`repair` makes up for what was lost; `prune` does all of it.
"""

from secateur.criteria.scores import Scores
from secateur.criteria.scoring import score
from secateur.errors import SecateurError
from secateur.graph.analysis import analyze
from secateur.graph.cost import Cost, measure
from secateur.graph.graph import Graph
from secateur.pruning.compare import compare
from secateur.pruning.export import export
from secateur.pruning.files import load, save
from secateur.pruning.loop import prune
from secateur.pruning.plan import Plan
from secateur.pruning.removal import apply
from secateur.pruning.repair.repair import repair
from secateur.pruning.result import Result
from secateur.pruning.specialize import specialize
from secateur.pruning.targets import plan
from secateur.relevance.explain import explain

__version__ = "0.1.0.dev0"

__all__ = [
    "Cost",
    "Graph",
    "Plan",
    "Result",
    "Scores",
    "SecateurError",
    "analyze",
    "apply",
    "compare",
    "explain",
    "export",
    "load",
    "measure",
    "plan",
    "prune",
    "repair",
    "save",
    "score",
    "specialize",
]
