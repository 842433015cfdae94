"""Recurrent layers: a unit is a number of the state, with its rows in all gates and the columns that read it.

If all its rows and biases are 0, a unit that starts at 0 stays 0: an LSTM adds σ(0)·tanh(0) = 0 to its cell, and a GRU
mixes tanh(0) = 0 with the state before. What starts elsewhere fades, and nobody reads it. A module has one size for all
its layers and both directions, so that their units of the same number leave together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.layers import Labels, head, lost, spread, varying
from secateur.ops.linear import read_by_weight
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Operation, Ruled, register


@dataclass(frozen=True)
class CellWeights:
    """The weights of one layer in one direction. `project` is (out, hidden) where an LSTM projects its state."""

    input: Tensor
    state: Tensor
    biases: Sequence[Tensor]
    project: Tensor | None

    @property
    def gates(self) -> int:
        """How many blocks of rows there are, each with a row for every unit."""
        hidden = self.state.shape[1] if self.project is None else self.project.shape[1]
        return len(self.state) // int(hidden)

    def seen(self, x: Tensor) -> Tensor:
        """What the gates get from the input, with all biases: a state of 0 then adds nothing. Only the reset gate of a
        GRU, which has three blocks, scales the last part of one."""
        if not self.biases:
            return F.linear(x, self.input)
        bias, third = self.biases[1], len(self.state) // 3
        if self.gates == 3:
            bias = torch.cat([bias[:-third], torch.zeros_like(bias[-third:])])
        return F.linear(x, self.input, self.biases[0]) + bias

    def recalled(self, state: Tensor) -> Tensor:
        """What the gates get from the state before."""
        return F.linear(state, self.state)


#: From what the gates get from the input, and the state before, to the next state.
Step = Callable[[Tensor, tuple[Tensor, ...], CellWeights], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Arguments:
    """What one call of a recurrent layer is given; `both`: it has two directions."""

    x: Tensor
    sizes: Tensor | None  # of the batch at each step, if sequences are packed
    states: Sequence[Tensor]
    cells: Sequence[CellWeights]
    both: bool
    batch_first: bool

    @classmethod
    def of(cls, call: Call) -> Arguments:
        """Read them: torch takes them by position only."""
        x, *rest = call.args
        if isinstance(call.operation, Cell):
            cell = CellWeights(call["w_ih"], call["w_hh"], tensors_in((call["b_ih"], call["b_hh"])), None)
            return cls(call["input"], None, tensors_in(call["hx"]), [cell], False, True)
        packed = isinstance(rest[2], tuple | list) and isinstance(rest[0], Tensor) and not rest[0].is_floating_point()
        sizes = rest.pop(0) if packed else None
        states, weights, biased, layers, _, _, both = rest[:7]
        count = len(weights) // (layers * (2 if both else 1))
        each = [weights[i : i + count] for i in range(0, len(weights), count)]
        end = 4 if biased else 2
        cells = [CellWeights(own[0], own[1], own[2:end], own[end] if count > end else None) for own in each]
        return cls(x, sizes, tensors_in(states), cells, bool(both), not packed and bool(rest[7]))

    @property
    def directions(self) -> int:
        """One or two."""
        return 2 if self.both else 1

    def start(self, cell: int) -> tuple[Tensor, ...]:
        """The state before, of a layer in a direction, as (samples, units)."""
        return tuple(state[cell] if state.ndim > 2 else state for state in self.states)

    def steps(self, x: Tensor) -> Sequence[Tensor]:
        """(samples, channels) for each step; ever fewer samples if they are packed."""
        if self.sizes is not None:
            return x.split_with_sizes(self.sizes.tolist())
        return [x] if x.ndim < 3 else x.unbind(1 if self.batch_first else 0)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """What `steps` took apart."""
        if self.sizes is not None:
            return torch.cat([*parts])
        return parts[0] if self.x.ndim < 3 else torch.stack([*parts], 1 if self.batch_first else 0)


class Recurrent(Operation):
    """LSTM, GRU, RNN as one fused call. Relevance passes as through the steps, spelt out: gates get none."""

    name = "recurrent layer"

    def __init__(self, step: Step) -> None:
        self.step = step

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        given = Arguments.of(call)
        x, cells, made = given.x, given.cells, tensors_in(output)
        for tensor, own in ((x, -1), *((state, -1) for state in given.states)):
            for layer in labels.others(tensor, [own]):
                labels.freeze(layer, f"{call.site} runs along it")
        rows = [labels.along(cell.input, 0) for cell in cells]
        first, project = rows[0], None if cells[0].project is None else labels.along(cells[0].project, 0)
        if first is None or any(line is None for line in rows) or (cells[0].project is not None and project is None):
            self._stays(labels, call, given)
            return
        units = first[: len(first) // cells[0].gates]
        shown = units if project is None else project  # what others see of the state
        read, steps = labels.along(x, -1), x.numel() // x.shape[-1]
        for i, cell in enumerate(cells):
            inner = i >= given.directions
            taken = labels.along(cell.input, 1)
            read_by_weight(labels, call, np.tile(shown, given.directions) if inner else read, taken)
            for tensor in (cell.input, cell.state, *cell.biases):
                labels.join(np.tile(units, cell.gates), _along(labels, tensor, 0))
            labels.join(shown, _along(labels, cell.state, 1))
            labels.cost(call.site, float(steps * cell.input.numel()), units, taken)
            labels.cost(call.site, float(steps * cell.state.numel()), units, shown)
            if cell.project is not None:
                labels.join(shown, _along(labels, cell.project, 0))
                labels.join(units, _along(labels, cell.project, 1))
                labels.cost(call.site, float(steps * cell.project.numel()), units, shown)
        if project is not None:
            labels.freeze(units, f"{call.site} projects its state (proj_size)")
        zero = True
        for state, line in zip(given.states, (shown, units), strict=False):
            zero &= self._starts(labels, call, state, line)
        self._makes(labels, call, given, shown)
        for tensor, line in zip(made, (np.tile(shown, given.directions), shown, units), strict=False):
            layer = spread(line, -1, tensor.shape)
            labels.set(tensor, [layer if zero else lost(layer)])
        for state, tensor in zip(given.states, made[-len(given.states) :], strict=True):
            labels.bind([state], tensor)

    def _starts(self, labels: LabelVerbs, call: Call, state: Tensor, units: Labels) -> bool:
        """The state before meets the units. Whether it is 0 where they are masked."""
        known = labels.along(state, -1)
        if known is not None:
            labels.join(units, known)
            return bool(known.min() >= 0)
        if state.ndim - 1 not in labels.fits(state):
            labels.freeze(units, f"{call.site} starts from a state of fixed size")
        return labels.is_void(state)

    def _makes(self, labels: LabelVerbs, call: Call, given: Arguments, shown: Labels) -> None:
        """Units are numbered by the rows that make what the last layer returns, in each direction."""
        numbered, held = [], []
        for i, cell in enumerate(given.cells):
            weights = [cell.input, cell.state] if cell.project is None else [cell.project]
            lines = [_along(labels, weight, 0).reshape(-1, len(shown)) for weight in weights]
            held.append(np.concatenate(lines))
            if i >= len(given.cells) - given.directions:
                numbered.append(lines[0][0])
        ways = [np.concatenate(held[i :: given.directions]) for i in range(given.directions)]
        labels.produce(np.concatenate(numbered), call.site, "hidden", np.concatenate(ways, 1))

    def _stays(self, labels: LabelVerbs, call: Call, given: Arguments) -> None:
        """Weights that are computed, or of a single unit: only what they read may shrink."""
        reason = f"state of {call.site}, whose weights are no parameters of several units"
        x, held = given.x, list(given.states)
        for i, cell in enumerate(given.cells):
            taken = labels.along(cell.input, 1) if i < given.directions else None
            if i < given.directions:
                read_by_weight(labels, call, labels.along(x, -1), taken)
                labels.freeze(labels.along(cell.input, 0), reason)
            held += tensors_in([*([] if i < given.directions else [cell.input]), cell.state, cell.biases, cell.project])
            for weight in tensors_in([cell.input, cell.state, cell.project]):
                steps = x.numel() // x.shape[-1]
                labels.cost(call.site, float(steps * weight.numel()), taken if weight is cell.input else None)
        for tensor in held:
            labels.freeze_tensor(tensor, reason)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        given = Arguments.of(call)
        if not any(t.requires_grad for t in call.tensors()):
            return relevance.stops(call)
        finals: list[tuple[Tensor, ...]] = []
        x = given.x
        for first in range(0, len(given.cells), given.directions):
            made = []
            for way in range(given.directions):
                start = given.start(first + way)
                out, final = self._unrolled(relevance, call, given, x, given.cells[first + way], start, way)
                made.append(out)
                finals.append(final)
            with relevance.again():
                x = made[0] if len(made) == 1 else torch.cat(made, -1)
        if isinstance(self, Cell):
            return finals[0] if len(given.states) > 1 else finals[0][0]
        with relevance.again():
            return (x, *(torch.stack(state) for state in zip(*finals, strict=True)))

    def _unrolled(
        self, relevance: RelevanceVerbs, call: Call, given: Arguments, x: Tensor, cell: CellWeights,
        start: tuple[Tensor, ...], way: int,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """What one layer returns in one direction, and its last states. Samples that are shorter end sooner."""
        size = start[0].shape[-1]
        with relevance.again():
            parts = given.steps(cell.seen(x))
            state = tuple(s[: len(parts[-1])] for s in start) if way else start
        made, ended = [], list[tuple[Tensor, ...]]()
        for part in reversed(parts) if way else parts:
            count = len(part)
            with relevance.again():
                if count > len(state[0]):
                    state = tuple(torch.cat([s, t[len(s) : count]]) for s, t in zip(state, start, strict=True))
                elif count < len(state[0]):
                    ended.insert(0, tuple(s[count:] for s in state))
                    state = tuple(s[:count] for s in state)
                state = self.step(part, state, cell)
            shown = relevance.tallies(call, state[0], given.cells[0].input, way * size, given.directions * size)
            state = (shown, *state[1:])
            made.append(state[0])
        with relevance.again():
            if ended:
                state = tuple(torch.cat(parts) for parts in zip(state, *ended, strict=True))
            return given.joined(made[::-1] if way else made), state


class Cell(Recurrent):
    """One step of a recurrent layer."""

    name = "recurrent cell"


def _lstm(x: Tensor, state: tuple[Tensor, ...], cell: CellWeights) -> tuple[Tensor, ...]:
    i, f, g, o = (x + cell.recalled(state[0])).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h if cell.project is None else F.linear(h, cell.project), c


def _gru(x: Tensor, state: tuple[Tensor, ...], cell: CellWeights) -> tuple[Tensor, ...]:
    (r, z, n), (s, y, m) = x.chunk(3, -1), cell.recalled(state[0]).chunk(3, -1)
    reset, update = (r + s).sigmoid(), z + y
    new = n + reset * m
    if cell.biases:
        with torch.no_grad():  # a constant: it gets no relevance
            shift = reset * cell.biases[1][-n.shape[-1] :]
        new = new + shift
    # σ(-a) is 1 - σ(a), and known as a gate.
    return ((-update).sigmoid() * new.tanh() + update.sigmoid() * state[0],)


def _tanh(x: Tensor, state: tuple[Tensor, ...], cell: CellWeights) -> tuple[Tensor, ...]:
    return ((x + cell.recalled(state[0])).tanh(),)


def _relu(x: Tensor, state: tuple[Tensor, ...], cell: CellWeights) -> tuple[Tensor, ...]:
    return ((x + cell.recalled(state[0])).relu(),)


class Packing(Ruled):
    """Sequences of several lengths, (steps, samples, …), become one row of positions, or the other way round."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, made = call["input"], tensors_in(output)[0]
        positions, kept = {0, 1} if x.ndim > made.ndim else {0}, []
        for layer in labels.layers(x):
            if positions & {*varying(layer)}:
                labels.freeze(layer, f"{call.site} runs along it")
            else:
                layer = head(layer, positions)
                layer = (layer[0] if x.ndim > made.ndim else layer[None]).expand(made.shape)
                kept.append(lost(layer) if call.get("padding_value") else layer)
        labels.set(made, kept)


def _along(labels: LabelVerbs, tensor: Tensor, dim: int) -> Labels:
    """The labels of a weight; 0 where it has none, so that what meets them stays."""
    found = labels.along(tensor, dim)
    return np.zeros(tensor.shape[dim], np.int64) if found is None else found


for _step, _layer, _cell in (
    (_lstm, torch.lstm, torch.lstm_cell),
    (_gru, torch.gru, torch.gru_cell),
    (_tanh, torch.rnn_tanh, torch.rnn_tanh_cell),
    (_relu, torch.rnn_relu, torch.rnn_relu_cell),
):
    register("input hx params *rest", _layer, operation=Recurrent(_step))
    register("input hx w_ih w_hh b_ih=None b_hh=None", _cell, operation=Cell(_step))
register("input lengths *rest", torch._pack_padded_sequence, operation=Packing())
register("input sizes batch_first padding_value total_length", torch._pad_packed_sequence, operation=Packing())
