"""The books of a relevance pass: what arrived at each operation, and what it passed on."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from secateur.errors import ConservationWarning


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
    """Start, input, and everything between, in the order of the forward pass.

    The check is local: an operation passes on what arrived. It is global as well: what reaches the model's input,
    and the constants that a rule lets take relevance, add up to the start.
    """

    start: float
    input: float
    flows: tuple[Flow, ...] = field(repr=False)

    @property
    def absorbed(self) -> float:
        """Relevance that rules let biases or constants keep, by definition."""
        return sum(flow.lost for flow in self.flows if flow.absorbs)

    @property
    def missing(self) -> float:
        """Share of the start that is neither at the input nor absorbed by definition."""
        return self._share(self.start - self.input - self.absorbed)

    @property
    def leaks(self) -> dict[str, float]:
        """For each operation, the share of the start that it loses (negative: creates), absorption apart."""
        shares: dict[str, float] = {}
        for flow in self.flows:
            if not flow.absorbs:
                shares[flow.name] = shares.get(flow.name, 0.0) + self._share(flow.lost)
        return shares

    @property
    def worst(self) -> float:
        """The largest share of the start that goes astray, in one operation or in all."""
        return max([abs(self.missing), *map(abs, self.leaks.values())])

    @property
    def layers(self) -> dict[str, float]:
        """Relevance that arrives at each conv and linear layer, as a share of the start."""
        shares: dict[str, float] = {}
        for flow in self.flows:
            if flow.kind in ("conv", "linear"):
                shares[flow.name] = shares.get(flow.name, 0.0) + self._share(flow.arrived)
        return shares

    def warn(self, tolerance: float = 0.01) -> None:
        """A `ConservationWarning` for what goes astray beyond the tolerance."""
        for name, share in self.leaks.items():
            if not abs(share) <= tolerance:
                _warn(f"`{name}` {'loses' if share > 0 else 'creates'} {abs(share):.1%} of the relevance")
        if not abs(self.missing) <= tolerance and not any(abs(share) > tolerance for share in self.leaks.values()):
            verb = "is missing" if self.missing > 0 else "too much arrives"
            _warn(f"{abs(self.missing):.1%} of the relevance {verb} at the input, no single operation being at fault")

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
        return value / self.start if self.start else value


def _warn(fact: str) -> None:
    warnings.warn(
        f"{fact}. Scores of different layers are then not comparable. Way out: another composite, or see "
        f"`.conservation` for every operation.",
        ConservationWarning,
        stacklevel=4,
    )
