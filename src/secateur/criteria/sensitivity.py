"""Gradient, Taylor and activation: functions of a unit's output z and of the loss gradient g there.

z is the output of the conv or linear call, before batch norm and nonlinearity. g = dL/dz, where L is the mean loss over
all samples: the criterion's own, or cross-entropy of the logits (binary cross-entropy if there is one). Where there are
targets for positions, the loss of a sample is the mean over those that count. Neither there nor among the outputs z of
its layers does padding count, as an attention mask tells it. One pass serves all of these criteria.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from secateur.criteria.criterion import Absolute, Accumulator, Criterion, Norm, Subject, Sums
from secateur.errors import Argument, CriterionError, SecateurError
from secateur.nest import tensors_in
from secateur.ops.conv import Convolution, TransposedConvolution
from secateur.ops.recurrent import Arguments, Recurrent
from secateur.ops.table import Call, lookup
from secateur.plans.scores import Values
from secateur.running.batches import counted, masks_in, size_of
from secateur.running.copies import named_tensors
from secateur.running.devices import precise
from secateur.running.goals import goal_of, loss_of, tapping
from secateur.running.logits import answer_of, logits_of
from secateur.running.observer import Observer, refuse_checkpoint, refuse_transform
from secateur.running.sandbox import refusal, run
from secateur.running.targets import Reader


@dataclass(frozen=True)
class Sensitivity(Criterion):
    """A criterion that is a sum, over samples and positions, of a function of z and g."""

    unseen_is_zero: ClassVar[bool] = True
    #: Whether g is needed. If not, there is no backward pass.
    backward: ClassVar[bool] = True

    def measure(self, z: Tensor, g: Tensor | None) -> Tensor:
        """The number at each position."""
        raise NotImplementedError

    def per_sample(self, z: Tensor, g: Tensor | None, channel: int, masks: Sequence[Tensor] = ()) -> Tensor:
        """(samples, units): the mean over the positions of each sample, without what a mask calls padding."""
        values = self.measure(z, g).movedim(channel, -1)
        if self.absolute == "square":
            values = values.to(torch.promote_types(values.dtype, torch.float32)).square()
        if values.ndim == 1:
            values = values.unsqueeze(0)
        wide = torch.promote_types(values.dtype, torch.float32)
        flat = next((mask for mask in masks if values.ndim == 2 and mask.numel() == len(values)), None)
        if flat is not None:  # positions of all samples one after the other
            values = values.view(*flat.shape, -1)
        counts = counted(masks, values.shape[:-1])
        if counts is not None:
            values = torch.where(counts[..., None], values, 0).sum(1, dtype=wide) / counts.sum(1)[:, None].clamp_min(1)
        else:
            values = values.flatten(1, -2).mean(1, dtype=wide) if values.ndim > 2 else values.to(wide)
        return values.abs() if self.absolute == "sample" else values

    def accumulate(self, subject: Subject) -> SensitivityPass:
        return SensitivityPass(subject, self)


@dataclass(frozen=True)
class Gradient(Sensitivity):
    """|Σ g| / (B·H·W), per layer divided by its l2 norm (Sun 2017, as the paper uses it)."""

    name: str = "gradient"
    norm: Norm = 2
    absolute: Absolute = "after"

    def measure(self, z: Tensor, g: Tensor | None) -> Tensor:
        assert g is not None
        return g

    def finish(self, total: Values, samples: int) -> Values:
        """Once for the mean over samples, once because L is itself a mean over them."""
        return total / samples**2


@dataclass(frozen=True)
class Taylor(Gradient):
    """|Σ z·g| / (B·H·W), per layer divided by its l2 norm (Molchanov 2016; its own form: `absolute="sample"`)."""

    name: str = "taylor"

    def measure(self, z: Tensor, g: Tensor | None) -> Tensor:
        """Half precision numbers are multiplied in single."""
        assert g is not None
        wide = torch.promote_types(z.dtype, torch.float32)
        return z.to(wide) * g.to(wide)


@dataclass(frozen=True)
class Activation(Sensitivity):
    """Mean |z|, per layer divided by its l2 norm."""

    backward: ClassVar[bool] = False

    name: str = "activation"
    norm: Norm = 2

    def measure(self, z: Tensor, g: Tensor | None) -> Tensor:
        return z.abs()

    def finish(self, total: Values, samples: int) -> Values:
        return total / samples


class SensitivityPass(Accumulator):
    """One forward and at most one backward pass per batch for any number of these criteria."""

    def __init__(self, subject: Subject, criterion: Sensitivity) -> None:
        super().__init__(subject)
        self.loss = criterion.loss
        self.backward = criterion.backward
        self.entries: list[tuple[Sensitivity, Sums]] = [(criterion, self.sums)]
        self._reader, self._masks, self.makers = Reader(subject.model), list[Tensor](), _Makers(subject)

    def join(self, criterion: Criterion) -> Accumulator | None:
        """The loss must be the same."""
        if not isinstance(criterion, Sensitivity) or criterion.loss is not self.loss:
            return None
        joined = Accumulator(self.subject)
        self.entries.append((criterion, joined.sums))
        self.backward |= criterion.backward
        return joined

    def update(self, inputs: Any, targets: Any) -> None:
        """Run one batch. Parameters get no gradient: only what units need is computed."""
        count = size_of(inputs)
        taps, self._masks = Taps(self), masks_in(inputs)
        with torch.inference_mode(False), torch.set_grad_enabled(self.backward):
            aim = goal_of(self.loss, targets)
            try:
                with tapping(self.subject.model, aim) as tapped, taps:
                    made = tapped(run(self.subject.model, inputs))
            except SecateurError:
                raise
            except Exception as error:
                raise refusal(self.subject.model, "a batch", inputs, error) from error
            if self.backward:
                output = None if aim is not None else logits_of(made)
                if not any(t.requires_grad for t in (tensors_in(made) if output is None else [output])):
                    raise CriterionError(
                        "the output does not depend on any conv or linear layer by operations that have a gradient.",
                        fix="check that the forward does not detach, or use a criterion without gradients",
                    )
                if aim is not None:
                    loss = loss_of(aim, made, targets)
                elif output is not None:
                    loss = self._reader.read(inputs, targets, output).loss(answer_of(made).entry)
                if not loss.requires_grad:
                    fix = "a function of the output by operations that have a gradient"
                    raise CriterionError("{loss} does not depend on the output.", fix=fix, loss=Argument("loss"))
                try:
                    torch.autograd.grad(loss * count, taps.anchor, allow_unused=True)
                except RuntimeError as error:
                    wrote = "modified by an inplace operation" in str(error)
                    if not wrote and "derivative for" not in str(error):
                        raise
                    why = "it writes over numbers of which a derivative needs the old ones" if wrote else error
                    instead = "write to a copy" if wrote else "detach() what such a function reads"
                    raise CriterionError(
                        f"{type(self.subject.model).__name__} has no gradient: {why}.",
                        fix=f"a criterion without gradients, or {instead}",
                    ) from error
        for _, sums in self.entries:
            sums.samples += count

    def take(self, index: int, channel: int, z: Tensor, g: Tensor | None) -> None:
        """Add what one call says about its units."""
        for criterion, sums in self.entries:
            if criterion.backward == (g is not None):
                values = criterion.per_sample(z.detach(), g, channel, self._masks)
                sums.add(index, values.to(precise(values.device)).sum(0))


class _Makers:
    """Which producer's units a call makes, by its number or, if other weights are read, by these (see `holds`)."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._kinds = {(site.path, site.function) for site in subject.place}
        self._known: dict[int, list[tuple[str, Tensor]]] = {}
        for name, tensor in named_tensors(subject.model):
            if tensor.layout == torch.strided and tensor.ndim > 1:
                self._known.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))

    def of(self, call: Call) -> int | None:
        """The number of the producer; None if the call makes no units."""
        if (call.site.path, call.site.function) not in self._kinds:
            return None
        index, read = self._subject.place.get(call.site), list[tuple[str, Callable[[int], int]]]()
        for tensor in call.tensors():
            if tensor.layout == torch.strided:
                known = self._known.get(tensor.untyped_storage()._cdata, ())
                read += [(name, partial(_begin, tensor, whole)) for name, whole in known]
        if not read or (index is not None and self._is_read(index, read)):
            return index
        others = [i for i in range(len(self._subject.producers)) if self._is_read(i, read)]
        return others[0] if len(others) == 1 else index

    def _is_read(self, index: int, read: Sequence[tuple[str, Callable[[int], int]]]) -> bool:
        return any(self._subject.holds(index, name, begin) for name, begin in read)


def _begin(view: Tensor, whole: Tensor, dim: int) -> int:
    """Where a view of a tensor begins along one of the tensor's dimensions."""
    first = int(view.storage_offset() - whole.storage_offset())
    return first // max(whole.stride(dim), 1) % max(whole.shape[dim], 1)


class Taps(Observer):
    """Sees the output of every call that makes units, and in the backward pass the gradient there."""

    def __init__(self, owner: SensitivityPass) -> None:
        super().__init__(owner.subject.model)
        self.owner, self._makers = owner, owner.makers
        # Every tap depends on this tensor: asking for its gradient runs the backward pass and changes nothing else.
        self.anchor = torch.zeros((), requires_grad=True)
        self._open: dict[int, weakref.ref[_Tap]] = {}

    def concerns(self, value: Any) -> bool:
        return False  # autograd knows the gradient of functions that the table does not know

    def observe(self, call: Call) -> Any:
        """Tap the calls that make units. If a later call writes over such an output, it is copied first."""
        index = self._makers.of(call)
        if index is None:
            if self._open and call.writes and not call.rectifies:  # where ReLU changes z, g is 0, so z·g is the same
                self._rescue(call.tensors()[:1])
            return call.run()
        if isinstance(call.operation, Recurrent):
            return self._recurrent(call, index)
        z: Tensor = call.run()
        channel = -1
        if isinstance(call.operation, Convolution | TransposedConvolution):
            channel = z.ndim - call.operation.spatial - 1
        with torch.no_grad():
            self.owner.take(index, channel, z, None)
        return self._tapped(call, index, channel, z) if self.owner.backward else z

    def _tapped(self, call: Call, index: int, channel: int, z: Tensor) -> Tensor:
        refuse_checkpoint(call.site)
        refuse_transform(call.site)
        tap = _Tap(self.owner, index, channel, z.detach())
        self._open[z.untyped_storage().data_ptr()] = weakref.ref(tap)
        return _Watch.apply(z, self.anchor, tap)  # type: ignore[no-any-return]

    def _recurrent(self, call: Call, index: int) -> Any:
        """z is what a recurrent layer returns for each step. Its last states have gradients of their own, which count
        as well, as (samples, layers, units). They are copied, for torch needs what its fused kernels return."""
        backward, ways = self.owner.backward, Arguments.of(call).directions
        # cuDNN has gradients in training mode only.
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled and not backward):
            made = call.run()
        out, *states = tensors_in(made)
        with torch.no_grad():
            self.owner.take(index, -1, out, None)
        if not backward:
            return made
        tapped = [self._tapped(call, index, -1, out.clone())]
        for state in states:
            if state.shape[-1] * ways != out.shape[-1]:  # cells whose state is projected are no units
                tapped.append(state)
            elif state.ndim == 2:
                tapped.append(self._tapped(call, index, -1, state.clone()))
            else:
                _, samples, size = state.shape
                z = state.view(-1, ways, samples, size).permute(2, 0, 1, 3).reshape(samples, -1, ways * size).clone()
                z = self._tapped(call, index, -1, z).view(samples, -1, ways, size)
                tapped.append(z.permute(1, 2, 0, 3).reshape(state.shape))
        return tapped[0] if isinstance(made, Tensor) else tuple(tapped)

    def passes_by(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._open and lookup(func) is None:  # nobody knows what it writes to
            self._rescue(tensors_in((args, kwargs)))

    def _rescue(self, tensors: Iterable[Tensor]) -> None:
        """Copy outputs that are about to be overwritten."""
        for tensor in tensors:
            known = self._open.pop(tensor.untyped_storage().data_ptr(), None)
            tap = known() if known is not None else None
            if tap is not None:
                tap.z = tap.z.clone()


@dataclass(eq=False)
class _Tap:
    """The output of one call."""

    owner: SensitivityPass
    index: int
    channel: int
    z: Tensor


class _Watch(torch.autograd.Function):
    """The identity, which hands the gradient to a tap. It works in place, so that nothing is copied."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, anchor: Tensor, tap: _Tap) -> Tensor:
        ctx.tap = tap
        ctx.mark_dirty(z)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        tap = ctx.tap
        tap.owner.take(tap.index, tap.channel, tap.z, g)
        return g, None, None
