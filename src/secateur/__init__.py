"""secateur prunes neural networks by explaining them.

    graph → scores → plan → smaller model

`analyze` finds what may leave, `score` says what is needed for your data, `plan` chooses, `apply` removes and verifies;
`repair` makes up for what was lost; `prune` does all of it.
"""

from secateur.analysis.analyze import analyze
from secateur.analysis.specialize import specialize
from secateur.criteria.scoring import score
from secateur.errors import SecateurError
from secateur.files.onnx import export
from secateur.files.saved import load, save
from secateur.latency.measure import measure
from secateur.loop.compare import compare
from secateur.loop.prune import Result, prune
from secateur.plans.plan import Plan
from secateur.plans.ranking import plan
from secateur.plans.scores import Scores
from secateur.relevance.explain import explain
from secateur.repair import repair
from secateur.structure.cost import Cost
from secateur.structure.graph import Graph
from secateur.surgery.apply import apply
from secateur.version import __version__

__all__ = [
    "Cost",
    "Graph",
    "Plan",
    "Result",
    "Scores",
    "SecateurError",
    "__version__",
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
