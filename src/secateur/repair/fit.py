"""The regression of one layer: rows of samples go in, the change of its weights comes out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from secateur.errors import RepairError
from secateur.repair.corrections import Change
from secateur.repair.layers import RepairableLayer
from secateur.repair.moments import FewRows, Moments, Regression, moments_for
from secateur.repair.rows import EVERY, Rows, hidden, operands, wide

if TYPE_CHECKING:
    from secateur.repair.layerwise import LayerCorrector

# So many copies of what a layer reads for a row are alive at once: how it lay before, or how a product wants it to lie.
_READ = 2
# And of what it returns: what is wanted, what it is, what it lacks, the latter two in double precision, a product.
_RETURNED = 9
# So many bytes of held-out rows are kept, even if their sums would take less.
_FEW = 2**26


class Enough(BaseException):
    """The layer in question has run."""


class LayerFit:
    """The regression of one layer: `add` rows, then `solve`; again until it is `solved`."""

    def __init__(self, corrector: LayerCorrector, layer: RepairableLayer) -> None:
        self._corrector, self.layer, self._rounds = corrector, layer, corrector.rounds
        self.solved = False
        #: The changes so far, of the model that is fitted to all samples and of the trial.
        self.changes: tuple[Change | None, Change | None] = None, None
        # Sums over rows that fit and over rows that are held out, of the model; then held out and fit, of the trial.
        self._sums: tuple[Moments, Moments, Moments, Moments] | None = None
        # In further rounds: sums of all rows and of those that fit, and the same with moved targets.
        self._bases: tuple[Regression, Regression] | None = None
        self._moved: tuple[Regression, Regression] | None = None

    def collect(self, trial: bool, first: bool, call: RepairableLayer, rows: Rows) -> Tensor:
        """Add the rows of a call, and stop the model after the last one: nothing that comes then is needed."""
        if call.turn or first:
            self.add(call, rows, trial)
        if call.turn == self.layer.calls[-1].turn:
            raise Enough
        return cast("Tensor", rows.call.run()) if rows.output is None else rows.output

    def add(self, call: RepairableLayer, rows: Rows, trial: bool) -> None:
        """Add the rows of some samples, which run through the model or through the trial; in further rounds, move
        them."""
        samples = self._corrector.samples
        index = torch.arange(samples.total)[rows.places]
        held = samples.held_all[index]
        for number, mask in zip((3, 2) if trial else (0, 1), (~held, held), strict=True):
            if bool(mask.any()):
                for members, part in self._parts(rows, mask):
                    self._add(call, rows, index, members, part, number)

    def _parts(self, rows: Rows, mask: Tensor) -> Iterator[tuple[Tensor | None, slice]]:
        """Samples, and some of their rows, that are looked at together: all, unless that takes much memory. What a
        convolution reads is as large as its kernel, for each row and channel: a depthwise one of 7 x 7 reads 49 times
        its input."""
        _, weight, _ = cast("tuple[Tensor, Tensor, Tensor | None]", operands(rows.call))
        outputs = weight.shape[self.layer.outputs]
        inputs = rows.groups * weight.numel() // max(outputs, 1) if not self._corrector.first(self.layer) else 0
        row = max(4, weight.element_size()) * (_READ * inputs + _RETURNED * outputs)
        fitting = max(1, self._corrector.reference.looked_at // max(row, 1))
        members = mask.nonzero().ravel()
        if len(members) * rows.count <= fitting:
            yield None if bool(mask.all()) else members, EVERY
            return
        samples, step = max(1, fitting // rows.count), min(fitting, rows.count)
        for some in (members[first : first + samples] for first in range(0, len(members), samples)):
            for begin in range(0, rows.count, step):
                yield some, EVERY if step == rows.count else slice(begin, begin + step)

    def _add(
        self, turn: RepairableLayer, rows: Rows, index: Tensor, members: Tensor | None, part: slice, number: int
    ) -> None:
        """Add some rows of some members to one of the sums."""
        if self._moved is not None and number == 2:
            return  # nothing is fitted to them
        corrector, layer, call = self._corrector, self.layer, rows.call
        x, weight, bias = cast("tuple[Tensor, Tensor, Tensor | None]", operands(call))
        places = index if members is None else index[members]
        members = None if members is None else members.to(x.device)
        of = slice(None) if members is None else members
        wanted = corrector.reference.wanted(turn, places)[:, part]
        full, groups = not corrector.first(layer), rows.groups
        read = rows.read(members, part).flatten(0, 1) if full else None
        added = None if rows.added is None else rows.added[of][:, part]
        kernel = None
        if read is None:
            y = rows.returned(members, part)
        else:
            kernel = wide(weight.detach())
            kernel = kernel[None] if layer.columns else kernel.reshape(groups, len(weight) // groups, -1).mT
            y = self._applied(read, kernel, bias).reshape(*wanted.shape[:2], -1)
        if wanted.shape != y.shape:
            raise RepairError(
                f"`{layer.weight}` returns rows of shape {tuple(y.shape)}, but {tuple(wanted.shape)} are left of "
                "the original's.",
                fix="repair the model that apply or prune made from this original",
            )
        weights = corrector.reference.weights.get(turn.key)
        counts = live = None
        if weights is not None:  # rows that do not count may hold anything
            counts = weights[places.to(weights.device)][:, part].ravel().to(y.device)
            live = counts > 0
            counts, read = counts[live], None if read is None else read[live]

        def flat(t: Tensor) -> Tensor:
            made = t.reshape(-1, groups, t.shape[-1] // groups)
            return made if live is None else made[live]

        if self._moved is None:
            if self._sums is None:
                size = groups, y.shape[-1] // groups, read.shape[-1] if read is not None else 0
                self._sums = self._empty(size, y)
            lacks = (wanted if added is None else wanted - added) - y
            self._sums[number].add(flat(lacks), flat(y), read, counts)
            return
        assert read is not None
        assert kernel is not None
        assert layer.span is not None
        for which, moved in enumerate(self._moved):
            if (number == 3) != bool(which):
                continue
            change = self.changes[which]
            if change is None or change.weight is None:
                continue
            total = self._applied(read, kernel + change.weight.to(kernel.dtype), bias, change.shift)
            goal = flat(wanted)
            if added is not None:
                total = total + flat(added)
            moved.move(hidden(goal, total, layer.span.view(2, groups, -1)), read, counts, later=number == 1)

    def _empty(self, size: tuple[int, int, int], y: Tensor) -> tuple[Moments, Moments, Moments, Moments]:
        """Empty sums."""
        samples, name = self._corrector.samples, self.layer.weight
        joined = min(self._corrector.reference.joined[name], samples.total)
        held = int(samples.held_all[:joined].sum())
        make = partial(moments_for, device=y.device, exact=y.dtype == torch.float64)
        fit, trial = (make(*size, (joined - held) * self.layer.rows) for _ in range(2))
        rows = held * self.layer.rows
        # A row of a depthwise convolution is as large as its kernel for each channel; sums are small then.
        few = isinstance(fit, FewRows) or rows <= size[2] or 4 * rows * size[0] * size[2] <= _FEW
        # Sums judge too, and of small errors single precision would leave nothing.
        kept = [make(*size, rows, keep=few, exact=not few or y.dtype == torch.float64) for _ in range(2)]
        return fit, kept[0], kept[1], trial

    @staticmethod
    def _applied(read: Tensor, kernel: Tensor, bias: Tensor | None, shift: Tensor | None = None) -> Tensor:
        """What a layer with these weights returns for rows (n, groups, features): (n, groups, outputs)."""
        made = (wide(read).transpose(0, 1) @ kernel).transpose(0, 1)
        for constant in (bias, shift):
            if constant is not None:
                made = made + constant.view(made.shape[1:]).to(made.dtype)
        return made

    def solve(self) -> None:
        """Find the changes from the rows."""
        self.solved = True
        if self._moved is not None:
            self._solve_moved(list(self._moved))
        elif self._sums is not None:
            self._solve_first(*self._sums)
        last = self.changes[0]
        if self._bases is not None and self._rounds and last is not None and last.weight is not None:
            self._moved = self._bases[0].snapshot(), self._bases[1].snapshot()
            self.solved = False

    def _solve_first(self, fit: Moments, held: Moments, trial: Moments, own: Moments) -> None:
        own = own if self._corrector.has_trial else fit
        first = self._corrector.choose(self.layer, own, trial)
        again = self._rounds and self.layer.span is not None and first.weight is not None
        if isinstance(own, Regression):
            own.spare()  # the search has gone beyond the best strength
        before = own.snapshot() if again and isinstance(own, Regression) else None
        self.changes = first, None
        if self._corrector.has_trial:
            if held.rows:  # else no such sample found room in this layer
                fit.join(held)
            self.changes = first.correction.fit(fit, self.layer.shifts), first
        if before is not None and isinstance(fit, Regression):
            self._bases = fit, before

    def _solve_moved(self, moved: list[Regression]) -> None:
        self._rounds -= 1
        self._moved = None
        if not self._rounds:  # what is solved goes before the next is
            self._sums = self._bases = None
        changes = list[Change | None]()
        for old in self.changes:
            sums = moved.pop(0)
            same = old is None or old.weight is None
            changes.append(old if same else cast("Change", old).correction.fit(sums, self.layer.shifts))
        self.changes = changes[0], changes[1]
