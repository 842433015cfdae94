"""Sums of relevance: one number per unit of each layer, and what each operation received and passed on.

A `Journal` collects the sums of one batch on the device. A `Page` reads them all at once. The `Ledger` adds up batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secateur.ops.table import Site
from secateur.relevance.conservation import Conservation, Flow
from secateur.relevance.weights import LayerUse
from secateur.running.devices import precise
from secateur.running.tensor_facts import TensorFacts

#: Absolute values before summing: not at all, of each sample's sum over space, of each element, or its square.
Absolute = Literal[False, "sample", "element", "square"]
#: Is shown the relevance of each layer's outputs.
Watch = Callable[[LayerUse, Tensor], None]
#: A tensor whose entries add up to a sum; None if that is 0.
Sum = Tensor | None
#: For each vector of unit sums the name of the weight, and the first and last of its rows.
Layout = tuple[tuple[str, int, int], ...]
#: Numbers too coarse to add up.
HALF = (torch.float16, torch.bfloat16)


class Journal:
    """The sums of one batch. They stay on the device until they are gathered."""

    def __init__(self, absolute: Absolute = False, watch: Watch | None = None) -> None:
        self._absolute, self._watch = absolute, watch
        self._layout: list[tuple[str, int, int]] = []
        self._vectors: list[Tensor] = []
        self._flows: list[tuple[object, str, Sum, Sum, bool]] = []
        # Sums by channel of relevance on its way to a layer, with the dimension and the version of the tensor.
        self._summed: TensorFacts[tuple[int, int, Tensor]] = TensorFacts()

    @property
    def plain(self) -> bool:
        """Whether it adds up all rows of a layer's output and shows them to nobody."""
        return not self._absolute and self._watch is None

    def flow(self, name: object, kind: str, arrived: Sum, passed: Sum, absorbs: bool = False) -> None:
        self._flows.append((name, kind, arrived, passed, absorbs))

    def sums(self, r: Tensor, channel: int | None) -> Tensor:
        """Sums of relevance that is about to be passed on: by channel where the layer before will need them."""
        if channel is None or self._absolute:
            return total(r)
        summed = self._by_channel(r, channel)
        self._summed[r] = (channel % r.dim(), r._version, summed)
        return summed

    def unit_sums(self, use: LayerUse, r: Tensor, besides: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Record one number per unit of a layer. Returns these, and sums that add up to all that arrived.

        With `besides`, only units that are 0 there count.
        """
        if self._watch is not None and besides is None:
            self._watch(use, r)
        known = None if self._absolute else self._summed.get(r)
        if known is not None and known[:2] == (use.channel % r.dim(), r._version):
            summed = known[2]
        else:
            summed = self._by_channel(r, use.channel)
        if besides is not None:
            summed = torch.where(besides == 0, summed, 0)
        self._units(use.name, use.rows.start, summed)
        return summed, total(r) if self._absolute else summed

    def columns(self, name: str, r: Tensor, first: int = 0) -> Tensor:
        """Record one number per column of an embedding, or of a part of the units of a recurrent layer."""
        sums = self._by_channel(r, -1)
        self._units(name, first, sums)
        return sums

    def gather(self, *more: Tensor) -> Page:
        """All sums in one row, still on the device. `more` are further sums to be read with them."""
        sums = [*more, *(s for _, _, arrived, passed, _ in self._flows for s in (arrived, passed))]
        seen = {id(t) for t in self._vectors}  # the same vector may belong to several layers, so all are kept
        others = {id(s): s for s in sums if s is not None and id(s) not in seen}
        tensors = [t for t in (*self._vectors, *others.values()) if t.numel()]  # (`reduceat` takes no empty part)
        places = {id(t): place for place, t in enumerate(tensors)}
        device = tensors[0].device
        return Page(
            tuple(self._layout),
            [(str(name), kind, absorbs) for name, kind, _, _, absorbs in self._flows],
            torch.cat([t.reshape(-1).to(device) for t in tensors]).to(precise(device)),
            np.cumsum([0, *(t.numel() for t in tensors[:-1])]),
            np.array([places.get(id(s), -1) for s in sums]),
        )

    def _units(self, name: str, first: int, sums: Tensor) -> None:
        self._layout.append((name, first, first + len(sums)))
        self._vectors.append(sums)

    def _by_channel(self, r: Tensor, channel: int) -> Tensor:
        channel %= r.dim()
        if self._absolute == "element":
            r = r.abs()
        dtype = wide(r)
        if self._absolute == "square":
            r = r.to(dtype).square()
        others = [d for d in range(r.dim()) if d != channel]
        if self._absolute == "sample" and others and others[0] == 0:
            r = r.sum(others[1:], dtype=dtype).abs() if others[1:] else r.abs()
            others = [0]
        return _column_sums(r, channel, others, dtype) if others else r


@dataclass(frozen=True, eq=False)
class Page:
    """What a journal gathered: all unit sums as `layout` lists them, then other sums, in one row on the device."""

    layout: Layout
    _flows: list[tuple[str, str, bool]]
    _row: Tensor
    _starts: npt.NDArray[np.int64]  # of each tensor in the row
    _places: npt.NDArray[np.int64]  # for each sum the tensor that adds up to it, -1 where it is 0

    @property
    def units(self) -> Tensor:
        return self._row[: sum(stop - start for _, start, stop in self.layout)]

    def read(self) -> tuple[list[Flow], list[float], bool]:
        """The flows from the output to the input, the further sums, and whether all is finite. Waits for the device."""
        row = self._row.cpu().double().numpy()
        sums = np.add.reduceat(row, self._starts)
        values = np.append(sums, 0.0)[self._places].tolist()
        own = len(values) - 2 * len(self._flows)
        rest, finite = iter(values[own:]), bool(np.isfinite(row).all())
        flows = [Flow(name, kind, next(rest), next(rest), absorbs) for name, kind, absorbs in self._flows]
        return flows, values[:own], finite


@dataclass(frozen=True, eq=False)
class Batch:
    """The results of one batch. `row` holds all unit sums as `layout` lists them."""

    output: Tensor
    heat: list[Tensor | None]
    layout: Layout
    row: Tensor
    flows: list[Flow]
    start: float
    size: float  # of the start, signs aside
    input: float
    finite: bool  # whether all sums are


class Ledger:
    """The sums of all batches."""

    def __init__(self) -> None:
        self.samples = 0
        #: For each call of a layer: the name of its weight, and the first and last of the rows that it uses.
        self.places: dict[Site, tuple[str, int, int]] = {}
        self._heights: dict[str, tuple[int, torch.device]] = {}
        self._rows: dict[Layout, Tensor] = {}
        self._flows: dict[tuple[str, str], list[Any]] = {}
        self._start = self._size = self._input = 0.0

    def open(self, site: Site, name: str, rows: slice, height: int, device: torch.device) -> None:
        """Units of a weight, some rows of which a call uses."""
        self.places[site] = (name, rows.start, rows.stop)
        self._heights[name] = (max(height, self._heights.get(name, (0, device))[0]), device)

    def add(self, batch: Batch) -> None:
        self.samples += batch.output.shape[0] if batch.output.dim() > 1 else 1
        self._start += batch.start
        self._size += batch.size
        self._input += batch.input
        for flow in batch.flows:
            entry = self._flows.setdefault((flow.name, flow.kind), [0.0, 0.0, flow.absorbs])
            entry[0], entry[1] = entry[0] + flow.arrived, entry[1] + flow.passed
            self._input += flow.arrived if flow.kind == "stop" else 0.0
        known = self._rows.get(batch.layout)
        self._rows[batch.layout] = batch.row.clone() if known is None else known + batch.row

    @property
    def units(self) -> dict[str, Tensor]:
        sums = {
            name: torch.zeros(height, dtype=precise(device), device=device)
            for name, (height, device) in self._heights.items()
        }
        for layout, row in self._rows.items():
            parts = torch.split_with_sizes(row, [stop - start for _, start, stop in layout])
            for (name, start, stop), part in zip(layout, parts, strict=True):
                sums[name][start:stop] += part.to(sums[name].device)
        return sums

    def conservation(self, composite: str = "") -> Conservation:
        order = reversed(list(self._flows.items()))
        return Conservation(
            self._start, self._input,
            tuple(Flow(name, kind, a, p, absorbs) for (name, kind), (a, p, absorbs) in order if kind != "stop"),
            self._size, composite,
        )  # fmt: skip


def _column_sums(r: Tensor, channel: int, others: list[int], dtype: torch.dtype) -> Tensor:
    """Sums over all dimensions but one."""
    if r.is_cuda and r.dim() > 2 and dtype == r.dtype:
        rows = r.movedim(channel, -1)
        if rows.is_contiguous():
            return by_ones(rows.flatten(0, -2))
    return r.sum(others, dtype=dtype)


def by_ones(rows: Tensor) -> Tensor:
    """The sum of all rows as a product with ones. A GPU takes a third of the time of torch's sum for that."""
    return torch.mv(rows.t(), _ones(len(rows), rows.dtype, rows.device))


def _ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As many ones. They are kept for good, a tensor for each power of two: recordings read them."""
    key = (count.bit_length(), dtype, device)
    if key not in _kept_ones:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # this memory would be its own
            return torch.ones(count, dtype=dtype, device=device)
        _kept_ones[key] = torch.ones(2 ** count.bit_length(), dtype=dtype, device=device)
    return _kept_ones[key][:count]


_kept_ones: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def total(r: Tensor) -> Tensor:
    """The sum, in float32 at least."""
    return r.sum(dtype=wide(r))


def wide(r: Tensor) -> torch.dtype:
    """In which numbers to add up."""
    return torch.float32 if r.dtype in HALF else r.dtype
