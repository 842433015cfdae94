"""Which tensor of a model's output is its answer, and whether that is a single logit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from secateur.errors import RelevanceError, SecateurWarning
from secateur.nest import attributes, entries, tensors_of_output


class Answer(NamedTuple):
    """The tensor of an output that counts, how to write it (`output['logits']`), and others it was chosen before."""

    tensor: Tensor
    entry: str = ""
    rivals: tuple[str, ...] = ()


def answer_of(output: Any) -> Answer:
    """The output itself; what is called `logits` or `out` in it; the only tensor of real numbers; or the first.

    What lies deeper, such as the states of a recurrent layer, is looked at if there is nothing else.
    """
    if isinstance(output, Tensor):
        return Answer(output)
    if isinstance(getattr(output, "logits", None), Tensor):
        return Answer(output.logits, "output.logits")
    parts = dict(_parts(output))
    for entry in ("output['logits']", "output['out']", "output.out"):
        if isinstance(parts.get(entry), Tensor):
            return Answer(parts[entry], entry)
    real = {entry: part for entry, part in parts.items() if isinstance(part, Tensor) and _may_answer(part)}
    if not real:
        deep = tensors_of_output(output)
        if not deep:
            raise RelevanceError(f"the model returns {type(output).__name__}, in which there is no tensor to explain.")
        named = {f"tensor {i} of the output": tensor for i, tensor in enumerate(deep)}
        real = {entry: tensor for entry, tensor in named.items() if _may_answer(tensor)} or {"": deep[0]}
    (entry, first), *others = real.items()
    return Answer(first, entry, tuple(name for name, other in others if other is not first))


def logits_of(output: Any, *, warn: bool = True) -> Tensor:
    """The tensor that relevance starts from. If others could be meant as well, a warning says which was taken."""
    answer = answer_of(output)
    if warn and answer.rivals:
        warnings.warn(
            f"the model returns several tensors, and {answer.entry} is taken for its answer, not "
            f"{', '.join(answer.rivals[:5])}. Fix, if another counts: wrap the model so that it returns that.",
            SecateurWarning,
            stacklevel=2,
        )
    return answer.tensor


def _parts(output: Any) -> Iterator[tuple[str, Any]]:
    """The entries of an output, as they would be written."""
    names = getattr(output, "_fields", None)  # of a NamedTuple
    inside = entries(output)
    for key, part in attributes(output) if inside is None else inside:
        if names or not isinstance(output, Mapping | tuple | list):
            yield f"output.{names[key] if names else key}", part
        else:
            yield f"output[{key!r}]", part


def _may_answer(tensor: Tensor) -> bool:
    """Real numbers, and not a single one such as a loss."""
    return tensor.is_floating_point() and tensor.dim() > 0


def one_output(output: Tensor, samples: int | None) -> bool:
    """Whether a model has a single output: (samples, 1), (samples, 1, …), or one number per sample."""
    if output.dim() > 1:
        return output.shape[1] == 1
    return samples is not None and output.numel() == samples
