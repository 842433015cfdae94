"""What a model's answer means: where its classes lie, which positions count, and what they should have said."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import DataError
from secateur.nest import select_samples, tensors_in
from secateur.ops.attention import MatMul
from secateur.ops.conv import Convolution, TransposedConvolution
from secateur.ops.linear import Linear
from secateur.ops.shape import Move
from secateur.ops.table import Call
from secateur.running.batches import counted, masks_in
from secateur.running.copies import unwrap
from secateur.running.logits import answer_of, one_output
from secateur.running.observer import Observer
from secateur.running.sandbox import evaluating, quiet, run
from secateur.running.tensor_facts import TensorFacts

#: A target that does not count, as in torch and transformers.
IGNORED = -100
# Language models whose labels are not moved by one position, although they generate text.
_UNSHIFTED = frozenset({"xlm", "xlnet", "flaubert"})


@dataclass(frozen=True, eq=False)
class Reading:
    """A model's answer with its classes along dimension 1 (0 if there is no dimension of samples).

    `targets` fit it: one class for each sample and position, IGNORED where none counts. They are None if not known.
    `counts` says which positions are no padding; None if all are. `axis` is where the output itself has its classes.
    `states` is what to call an output that has states of a model without a head instead of classes, else empty.
    """

    logits: Tensor
    targets: Any = None
    counts: Tensor | None = None
    axis: int = 1
    states: str = ""

    def known(self, entry: str = "") -> Tensor:
        """The targets, checked. `entry` is what to call the output."""
        return check_targets(self.targets, self.logits, entry)

    def loss(self, entry: str = "", *, check: bool = True) -> Tensor:
        """The mean loss over the samples."""
        return default_loss(self.logits, self.targets, entry, check=check)

    def back(self, values: Tensor) -> Tensor:
        """Numbers for `logits` as numbers for the output itself."""
        return values if values.ndim < 3 else values.movedim(1, self.axis)


class Reader:
    """Reads the answers of a model. Where the classes lie is found out once.

    A language model of transformers that generates text answers for the next token: its labels are those of its input
    ids, and move by one position. If they are not given, they are the input ids themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrap(model)
        self._found: dict[int, tuple[int | None, str]] = {}
        config, generates = getattr(self._model, "config", None), getattr(self._model, "can_generate", None)
        #: Whether it is a language model that generates text, and whether it has an encoder.
        self.generates = callable(generates) and bool(generates())
        self.two_texts = bool(getattr(config, "is_encoder_decoder", False))
        self.causal = self.generates and not self.two_texts and getattr(config, "model_type", "") not in _UNSHIFTED

    def view(self, inputs: Any, targets: Any, output: Tensor) -> Reading:
        """`output`, the answer to `inputs`, with its classes along dimension 1. `targets` help to find them."""
        named = hasattr(self._model, "config")  # outputs of transformers have names
        states = _states(self._facts(inputs, output.ndim)[1]) if named and targets is None else ""
        if output.ndim < 3:
            return Reading(output, targets, None, output.ndim - 1, states)
        axis = self.axis(inputs, targets, output)
        logits = output.movedim(axis, 1)
        counts = counted(masks_in(inputs, decoder=self.two_texts), (len(logits), *logits.shape[2:]))
        return Reading(logits, targets, None if counts is None else counts.to(output.device), axis, states)

    def _facts(self, inputs: Any, ndim: int) -> tuple[int | None, str]:
        """Along which dimension the answer is made, and how it would be written. The model runs once to see that."""
        if ndim not in self._found:
            self._found[ndim] = _made_along(self._model, inputs, ndim)
        return self._found[ndim]

    def read(self, inputs: Any, targets: Any, output: Tensor) -> Reading:
        """What `output`, the answer to `inputs`, should have said."""
        if isinstance(targets, list | tuple) and not tensors_in(targets):
            with suppress(TypeError, ValueError, RuntimeError):
                targets = torch.as_tensor(targets, device=output.device)
        if self.two_texts and targets is not None and isinstance(inputs, Mapping):
            self._check_second(inputs)
        seen = self.view(inputs, targets, output)
        counts, places = seen.counts, (len(output), *seen.logits.shape[2:])
        if self.causal and len(places) == 2:
            ids = ids_in(inputs)
            if targets is None and ids is not None and tuple(ids.shape) == places:
                targets = ids
            if isinstance(targets, Tensor) and tuple(targets.shape) == places and not targets.is_floating_point():
                targets = F.pad(targets[:, 1:], (0, 1), value=IGNORED)
                counts = None if counts is None else counts & F.pad(counts[:, 1:], (0, 1))
        if isinstance(targets, Tensor) and output.ndim > 2:
            if targets.shape == output.shape and targets.is_floating_point():
                targets = targets.movedim(seen.axis, 1)
            elif counts is not None and targets.shape == counts.shape:
                targets = targets.masked_fill(~counts.to(targets.device), IGNORED)
        return replace(seen, targets=targets, counts=counts)

    def _check_second(self, inputs: Mapping[str, Any]) -> None:
        """Refuse a text without the one that the decoder reads: a model would take the first for it."""
        if not any(inputs.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds")):
            raise DataError(
                f"{type(self._model).__name__} has a decoder, and there are no decoder_input_ids among the inputs.",
                fix="DataCollatorForSeq2Seq(tokenizer, model=model), or "
                "model.prepare_decoder_input_ids_from_labels(labels)",
            )

    def axis(self, inputs: Any, targets: Any, output: Tensor) -> int:
        """The dimension of an output along which its classes lie."""
        if output.ndim < 3:
            return output.ndim - 1
        made, entry = self._facts(inputs, output.ndim)
        if made is not None:
            return made
        last, shape = output.ndim - 1, tuple(output.shape)
        if _states(entry):
            return last
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            fitting = [a for a in (1, last) if tuple(targets.shape) == shape[:a] + shape[a + 1 :]]
            if len(fitting) == 1:
                return fitting[0]
        if last > 2 or shape[1:] == (1, 1):
            return 1  # (samples, classes, height, width)
        raise DataError(
            f"the output has shape {shape}, and no conv or linear layer tells whether the classes lie along "
            "dimension 1 or 2.",
            fix="give targets, of shape (samples, positions); or say where relevance starts, or what the loss is, by "
            "target=f(output) or loss=f(output, targets); or wrap the model so that it ends with the layer that makes "
            "the classes",
        )


def ids_in(inputs: Any) -> Tensor | None:
    """The token numbers among the inputs, (samples, positions); None if there are none."""
    if isinstance(inputs, Mapping):
        ids = inputs.get("input_ids")
        return ids if isinstance(ids, Tensor) and ids.ndim == 2 else None
    whole = (t for t in tensors_in(inputs) if t.dtype in (torch.int64, torch.int32))
    first = next(whole, None)
    return first if first is not None and first.ndim == 2 else None


# -- where the classes lie ---------------------------------------------------------------------------------------------
def _states(entry: str) -> str:
    """The entry of an output, if its name tells that it has states and no classes."""
    return entry if "hidden_state" in entry or "embeds" in entry or "pooler_output" in entry else ""


def _made_along(model: nn.Module, inputs: Any, ndim: int) -> tuple[int | None, str]:
    """The dimension of a model's answer along which the last layer's units lie; None if that is not known. And how the
    answer would be written."""
    sizes = {len(t) if t.ndim else 0 for t in tensors_in(inputs)}
    ways = [select_samples(inputs, slice(1)), inputs] if len(sizes) == 1 else [inputs]
    for given in ways:  # one sample is enough, but inputs may have no dimension of samples
        with suppress(Exception), quiet(), evaluating(model), _Makers(model) as seen:
            answer, entry, _ = answer_of(run(model, given))
            found = seen.axes.get(answer) if answer.ndim == ndim else None
            return found or None, entry  # samples lie along 0
    return None, ""


class _Makers(Observer):
    """Follows the dimension along which the units of a conv or linear layer lie, until something mixes them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.axes: TensorFacts[int] = TensorFacts()

    def concerns(self, value: Any) -> bool:
        return False

    def observe(self, call: Call) -> Any:
        known = [(t, axis) for t in call.tensors() if (axis := self.axes.get(t)) is not None]
        output, operation = call.run(), call.operation
        if isinstance(operation, Linear) or _multiplies(call):
            self.axes[output] = output.ndim - 1
        elif isinstance(operation, Convolution | TransposedConvolution):
            self.axes[output] = output.ndim - operation.spatial - 1
        elif known:
            for made in tensors_in(output):
                found = {self._followed(call, x, axis, made) for x, axis in known} - {None}
                if len(found) == 1:
                    self.axes[made] = found.pop()  # type: ignore[assignment]
        return output

    def _followed(self, call: Call, x: Tensor, axis: int, made: Tensor) -> int | None:
        """Where the units of `x` lie in `made`, which the call makes of it."""
        if made.ndim == x.ndim and not isinstance(call.operation, Move):
            return axis if made.shape[axis] == x.shape[axis] else None
        shape = [1] * x.ndim
        shape[axis] = x.shape[axis]
        numbers = torch.arange(1.0, 1 + x.shape[axis], device=x.device).view(shape).expand(x.shape)
        with suppress(Exception):  # whatever the call says to other numbers
            moved = next(t for t in tensors_in(call.on(x)(numbers.clone())) if t.shape == made.shape)
            along = [d for d in range(moved.ndim) if bool((moved != moved.narrow(d, 0, 1)).any())]
            return along[0] if len(along) == 1 else None
        return None


def _multiplies(call: Call) -> bool:
    """Whether each position of a text is multiplied by the same matrix, as by a linear layer that is written out."""
    if type(call.operation) is not MatMul or call.operation.reflected:
        return False
    x, matrix = call["input"], call["other"]
    return isinstance(matrix, Tensor) and isinstance(x, Tensor) and matrix.ndim == 2 < x.ndim


# -- targets and losses ------------------------------------------------------------------------------------------------
_OTHER_SIZE = "; LRP(start=Segmentation()) and Taylor(loss=Segmentation()) take masks of another size"


def check_targets(targets: Any, output: Tensor, entry: str = "") -> Tensor:
    """Class numbers that fit the output, or an error that says which does not. `entry` is what to call the output.

    IGNORED stands for no class. Targets of a model with one output come back shaped like it; class numbers must be 0 or
    1 there.
    """
    if targets is None:
        raise DataError("this needs targets, but they are None.", fix="the true class of each sample")
    try:
        known: Tensor = torch.as_tensor(targets, device=output.device)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"targets are a {type(targets).__name__} that is no tensor of class numbers.",
            fix="one class for each sample or position, or your own loss=f(output, targets)",
        ) from None
    shape = f"{entry} {tuple(output.shape)}".lstrip()
    if one_output(output, known.numel()):
        return _single(known, output, shape)
    if known.is_floating_point():
        if known.shape != output.shape:
            raise DataError(
                f"targets of shape {tuple(known.shape)} are real, and do not fit the output {shape}.",
                fix="whole class numbers, or your own loss=f(output, targets)",
            )
        return known
    if output.ndim < 2:
        raise DataError(f"the output has shape {shape}; classes need (samples, classes).", fix="loss=…")
    expected = (output.shape[0], *output.shape[2:])
    if tuple(known.shape) != expected:
        raise DataError(
            f"targets have shape {tuple(known.shape)}, but the output {shape} asks for {expected}."
            if output.ndim < 3
            else f"targets have shape {tuple(known.shape)}, but the output asks for {expected}: it has "
            f"{output.shape[1]} classes at each position.",
            fix="targets.argmax(1)"
            if known.shape == output.shape
            else f"one class number for each of these{_OTHER_SIZE if output.ndim == 4 else ''}",
        )
    counting, classes = known[known != IGNORED], output.shape[1]
    low, high = (int(counting.min()), int(counting.max())) if counting.numel() else (0, 0)
    if low < 0 or high >= classes:
        where = f" in {entry}" if entry else ""
        raise DataError(
            f"labels run from {low} to {high}, but the model has {classes} outputs (0 to {classes - 1}){where}.",
            fix="number the classes as the outputs are, or `specialize` the model to the outputs you need"
            if output.ndim < 4
            else "number the classes as the outputs are; pixels of no class are -100, or 255 with "
            "LRP(start=Segmentation()) or Taylor(loss=Segmentation())",
        )
    return known.long()


def _single(known: Tensor, output: Tensor, shape: str) -> Tensor:
    one_each = output.ndim < 2 or known.numel() == output.numel() == len(output)
    if not one_each and known.shape not in (output.shape, output.shape[:1] + output.shape[2:]):
        raise DataError(f"targets have shape {tuple(known.shape)}, but the model has one output, of shape {shape}.")
    if not known.is_floating_point() and bool(((known != IGNORED) & ((known < 0) | (known > 1))).any()):
        raise DataError(
            f"labels run from {int(known.min())} to {int(known.max())}, but the model has one output, which "
            "tells 1 from 0.",
            fix="real numbers (targets.float()) if it predicts a quantity, or an output for each class",
        )
    return known.reshape(output.shape)


def is_binary(targets: Tensor) -> bool:
    """Whether all that count are 0 or 1."""
    return bool(((targets == 0) | (targets == 1) | (targets == IGNORED)).all())


def are_shares(targets: Tensor) -> bool:
    """Whether they are ≥ 0 and add up to 1 over the classes."""
    sums = targets.double().sum(1 if targets.ndim > 1 else 0)
    return bool((targets >= 0).all()) and bool(((sums - 1).abs() < 1e-2).all())


def default_loss(output: Tensor, targets: Any, entry: str = "", *, check: bool = True) -> Tensor:
    """The mean loss of logits: cross-entropy, or for a model with one output binary cross-entropy.

    The loss of a sample is the mean over its positions that count. (Over a single output, softmax is 1 and
    cross-entropy 0 whatever the weights are.)
    """
    known = check_targets(targets, output, entry) if check else torch.as_tensor(targets, device=output.device)
    wide = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    if one_output(output, known.numel()):
        if check and not is_binary(known):
            raise DataError(
                f"the model has one output (of shape {tuple(output.shape)}), and targets are not all 0 or 1: "
                "binary cross-entropy does not fit.",
                fix="your own loss=f(output, targets), e.g. torch.nn.functional.mse_loss",
            )
        known = known.reshape(output.shape)
        wanted = known.clamp_min(0).to(wide.dtype)
        return _mean(F.binary_cross_entropy_with_logits(wide, wanted, reduction="none"), known != IGNORED)
    if not known.is_floating_point():
        if wide.ndim > 2 and wide.stride(1) == 1:  # tokens: classes lie together in memory, and torch need not copy
            rows = wide.movedim(1, -1)
            losses = F.cross_entropy(rows.flatten(0, -2), known.long().flatten(), reduction="none").view(known.shape)
        else:
            losses = F.cross_entropy(wide, known.long(), reduction="none")
        return _mean(losses, known != IGNORED)
    if check and not are_shares(known):
        raise DataError(
            f"targets of shape {tuple(known.shape)} are real numbers that are no probabilities of classes: "
            "cross-entropy does not fit.",
            fix="your own loss=f(output, targets), e.g. torch.nn.functional.mse_loss",
        )
    return F.cross_entropy(wide, known)


def _mean(losses: Tensor, counts: Tensor) -> Tensor:
    """The mean over samples of the mean over the positions of each that count. What does not count has the loss 0."""
    if losses.ndim < 2:
        return torch.where(counts, losses, 0).mean()
    sums, members = (t.flatten(1).sum(1) for t in (torch.where(counts, losses, 0), counts))
    return (sums / members.clamp_min(1)).mean()
