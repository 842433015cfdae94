"""The books of a relevance pass: what arrived at each operation, and what it passed on."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secateur.errors import ConservationWarning
from secateur.running.devices import precise

#: A sum that is not yet known: a number, or a tensor whose entries add up to it.
Sum = Tensor | float


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


class Journal:
    """What is written down while one batch goes back. It stays on the device, and is gathered in one go."""

    def __init__(self) -> None:
        self.layout: list[tuple[str, int, int]] = []  # the weight of each vector of unit sums, and its rows
        self._vectors: list[Tensor] = []
        self._flows: list[tuple[Any, str, Sum, Sum, bool]] = []

    def units(self, name: str, rows: slice, sums: Tensor) -> None:
        """One number per unit of a layer."""
        self.layout.append((name, rows.start, rows.stop))
        self._vectors.append(sums)

    def flow(self, name: object, kind: str, arrived: Sum, passed: Sum, absorbs: bool = False) -> None:
        """What arrived at an operation and what it passed on."""
        self._flows.append((name, kind, arrived, passed, absorbs))

    def gather(self, *more: Sum) -> Page:
        """Everything side by side, still on the device; `more` are further sums to be read with it."""
        sums = [*more, *(s for _, _, arrived, passed, _ in self._flows for s in (arrived, passed))]
        seen = {id(t) for t in self._vectors}  # the same vector may stand for several layers, so all are kept
        others = {id(s): s for s in sums if isinstance(s, Tensor) and id(s) not in seen}
        tensors = [*self._vectors, *others.values()]
        places = {id(t): place for place, t in enumerate(tensors)}
        row = None
        if tensors:
            device = tensors[0].device
            row = torch.cat([t.reshape(-1).to(device) for t in tensors]).to(precise(device))
        return Page(
            tuple(self.layout),
            [(str(name), kind, absorbs) for name, kind, _, _, absorbs in self._flows],
            row,
            np.cumsum([0, *(t.numel() for t in tensors[:-1])]),
            np.array([places[id(s)] if isinstance(s, Tensor) else -1 for s in sums], dtype=np.int64),
            np.array([0.0 if isinstance(s, Tensor) else s for s in sums]),
        )


@dataclass(frozen=True, eq=False)
class Page:
    """What a journal gathered: all unit sums as `layout` lists them, then other sums, in one row on the device."""

    layout: tuple[tuple[str, int, int], ...]
    _flows: list[tuple[str, str, bool]]
    _row: Tensor | None
    _starts: npt.NDArray[np.int64]  # of each tensor in the row
    _places: npt.NDArray[np.int64]  # for each sum the tensor that adds up to it, -1 where it is a number
    _numbers: npt.NDArray[np.float64]

    @property
    def units(self) -> Tensor | None:
        """The unit sums, on the device."""
        count = sum(stop - start for _, start, stop in self.layout)
        return None if self._row is None or not count else self._row[:count]

    def read(self) -> tuple[list[Flow], list[float]]:
        """The flows from the output to the input, and the further sums. Waits for the device."""
        found = self._numbers
        if self._row is not None:
            sums = np.add.reduceat(self._row.cpu().double().numpy(), self._starts)
            found = np.where(self._places >= 0, sums[self._places], found)
        values = found.tolist()
        own = len(values) - 2 * len(self._flows)
        rest = iter(values[own:])
        return [Flow(name, kind, next(rest), next(rest), absorbs) for name, kind, absorbs in self._flows], values[:own]


def slack(kind: str, like: Tensor) -> float:
    """The share of relevance that rounding alone may move in an operation; what exceeds it got stuck."""
    if not like.is_cuda or like.dtype == torch.float64 or kind not in ("conv", "linear"):
        return 1e-5
    try:
        coarse = torch.backends.cudnn.allow_tf32 if kind == "conv" else torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # set by another interface than this one
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
