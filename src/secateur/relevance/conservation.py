"""Conservation: how much relevance arrived at each operation, and how much of it was passed on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from secateur.errors import ConservationWarning

# How many times the start may arrive at one operation before a warning. Trained and random models stay below 20.
_EXPLODED = 100


@dataclass(frozen=True)
class Flow:
    """One operation: relevance that arrived at its outputs, relevance passed to its inputs."""

    name: str
    kind: str
    arrived: float
    passed: float
    absorbs: bool = False

    @property
    def lost(self) -> float:
        """Relevance that stayed in the operation (negative: appeared in it)."""
        return self.arrived - self.passed


@dataclass(frozen=True)
class Conservation:
    """Relevance at the start, at the input and at every operation between, in the order of the forward pass.

    The local check: each operation passes on what arrived. The global check: what reaches the model's input and what
    rules let constants absorb add up to the start.
    """

    start: float
    input: float
    flows: tuple[Flow, ...] = field(repr=False)
    size: float = 0.0  # of the start, signs aside
    composite: str = ""  # by which rules

    @property
    def absorbed(self) -> float:
        """Relevance that biases or constants keep by the definition of the rules."""
        return sum(flow.lost for flow in self.flows if flow.absorbs)

    @property
    def missing(self) -> float:
        """The share of the start that neither reached the input nor was absorbed by definition."""
        return self._share(self.start - self.input - self.absorbed)

    @property
    def leaks(self) -> dict[str, float]:
        """The share of the start that each operation loses (negative: creates), apart from absorption."""
        return self._shares((flow.name, flow.lost) for flow in self.flows if not flow.absorbs)

    @property
    def worst(self) -> float:
        """The largest share of the start that is lost or created, in one operation or in total."""
        return max([abs(self.missing), *map(abs, self.leaks.values())])

    @property
    def layers(self) -> dict[str, float]:
        """Relevance that arrives at each conv and linear layer, as a share of the start."""
        return self._shares((flow.name, flow.arrived) for flow in self.flows if flow.kind in ("conv", "linear"))

    def warn(self, tolerance: float = 0.01) -> None:
        """Issue a `ConservationWarning` for each loss beyond the tolerance."""
        for name, share in self.leaks.items():
            if not abs(share) <= tolerance:
                _warn(f"`{name}` {'loses' if share > 0 else 'creates'} {abs(share):.1%} of the relevance")
        if not abs(self.missing) <= tolerance and not any(abs(share) > tolerance for share in self.leaks.values()):
            verb = "is missing" if self.missing > 0 else "too much arrives"
            _warn(f"{abs(self.missing):.1%} of the relevance {verb} at the input, no single operation being at fault")
        peak = max(self.flows, key=lambda flow: abs(flow.arrived), default=None)
        if peak is not None and abs(self._share(peak.arrived)) > _EXPLODED:
            times = f"{abs(self._share(peak.arrived)):.3g} times what it started with"
            _warn(f"relevance grows to {times} at `{peak.name}`, because positive and negative parts cancel")

    def __str__(self) -> str:
        lines = [f"start {self.start:.6g}, input {self.input:.6g}, absorbed {self.absorbed:.6g}"]
        lines += [f"{'arrives':>9}  {'lost':>9}  operation"]
        for flow in self.flows:
            note = " (by definition)" if flow.absorbs and flow.lost else ""
            lines.append(
                f"{self._share(flow.arrived):9.2%}  {self._share(flow.lost):9.2%}  {flow.kind} `{flow.name}`{note}"
            )
        return "\n".join(lines)

    def _share(self, value: float) -> float:
        whole = math.copysign(self.size, self.start) if self.size else self.start
        return value / whole if whole else value

    def _shares(self, values: Iterable[tuple[str, float]]) -> dict[str, float]:
        shares: dict[str, float] = {}
        for name, value in values:
            shares[name] = shares.get(name, 0.0) + self._share(value)
        return shares


def slack(kind: str, like: Tensor) -> float:
    """The share of relevance that rounding alone may lose in an operation. A larger loss means that it got stuck."""
    if not like.is_cuda or like.dtype == torch.float64 or kind not in ("conv", "linear"):
        return 1e-5
    try:
        coarse = torch.backends.cudnn.allow_tf32 if kind == "conv" else torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # it was set through another interface
        coarse = True
    return 1e-3 if coarse else 1e-5  # TF32 has ten bits


def _warn(fact: str) -> None:
    warnings.warn(
        ConservationWarning(
            f"{fact}. Scores of different layers are then not comparable.",
            fix="another composite, or see `.conservation` for every operation",
        ),
        stacklevel=4,
    )
