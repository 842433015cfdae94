"""secateur prunes neural networks by explaining them.

    graph → scores → plan → smaller model

`analyze` finds what may leave, `score` says what is needed for your data, `plan` chooses, `apply` removes and verifies;
`repair` makes up for what was lost, `recover` trains what is left; `prune` does all of it.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from secateur.version import __version__

if TYPE_CHECKING:
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
    from secateur.recover import recover
    from secateur.relevance.explain import explain
    from secateur.repair import repair
    from secateur.runtimes.table import latency
    from secateur.structure.cost import Cost
    from secateur.structure.graph import Graph
    from secateur.surgery.apply import apply

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
    "latency",
    "load",
    "measure",
    "plan",
    "prune",
    "recover",
    "repair",
    "save",
    "score",
    "specialize",
]

# Where the names live. They are imported at first use: torch takes seconds, for which `--help` need not wait.
_HOMES = {
    "analyze": "analysis.analyze", "specialize": "analysis.specialize", "score": "criteria.scoring",
    "SecateurError": "errors", "export": "files.onnx", "load": "files.saved", "save": "files.saved",
    "measure": "latency.measure", "compare": "loop.compare", "Result": "loop.prune", "prune": "loop.prune",
    "Plan": "plans.plan", "plan": "plans.ranking", "Scores": "plans.scores", "explain": "relevance.explain",
    "recover": "recover", "repair": "repair", "latency": "runtimes.table", "Cost": "structure.cost",
    "Graph": "structure.graph", "apply": "surgery.apply",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Python makes an imported package an attribute of its parent. Functions such as `repair` go before packages."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _HOMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
