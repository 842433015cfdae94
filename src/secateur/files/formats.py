"""In which number formats a model has the buffers that no file holds, as the frequencies of rotary embeddings.

Transformers leaves them in float32 when it loads weights in half precision, and `model.half()` rounds them. Both kinds
of models are saved, and their weights look the same. Where attention is sharp, their outputs differ.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import FileFormatError
from secateur.files.architecture import is_pretrained
from secateur.files.fingerprint import distance
from secateur.running.copies import unwrap

# What bfloat16 holds, float16 often holds as well, so it comes first.
_FORMATS = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64,
}  # fmt: skip


def unsaved(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of real and complex numbers that no file holds, as the frequencies of rotary embeddings."""
    state = model.state_dict(keep_vars=True)
    held = {id(item) for item in state.values()}
    named = model.named_buffers(remove_duplicate=False)
    return {n: t for n, t in named if id(t) not in held and (t.is_floating_point() or t.is_complex())}


def stock_formats(model: Any, kind: torch.dtype) -> dict[str, torch.dtype]:
    """In which formats `from_pretrained(dtype=kind)` has the parameters and buffers."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with torch.device("meta"):
            made = type(model)(copy.deepcopy(model.config))
    finally:
        torch.set_default_dtype(usual)
    found = {name: tensor.dtype for name, tensor in (*made.named_parameters(), *made.named_buffers())}
    lists = {torch.float16: ("", "_strict"), torch.bfloat16: ("_strict",)}.get(kind, ())
    words = [word for end in lists for word in getattr(made, f"_keep_in_fp32_modules{end}", None) or ()]
    wide = re.compile("|".join(word.replace("*", ".*") for word in words))
    return found | {name: torch.float32 for name in made.state_dict() if words and wide.search(name)}


def as_stock(model: nn.Module, kind: torch.dtype) -> nn.Module:
    """Put a model of transformers into a number format, in place, as `from_pretrained(dtype=kind)` has it.

    `model.to(kind)` rounds also the buffers and weights that transformers leaves in float32.
    """
    formats = stock_formats(unwrap(model), kind)
    for name, tensor in (*unwrap(model).named_parameters(), *unwrap(model).named_buffers()):
        tensor.data = tensor.data.to(formats.get(name, kind if tensor.is_floating_point() else tensor.dtype))
    return model


# -- in a saved folder -------------------------------------------------------------------------------------------------
def formats_of(model: nn.Module) -> dict[str, list[str]]:
    """For each such buffer the formats that its numbers went through: it may have been rounded and widened again."""
    return {name: [*_rounded_to(tensor), _name(tensor.dtype)] for name, tensor in _real(model).items()}


def take_formats(model: nn.Module, noted: Any, fingerprint: Any, path: Path) -> None:
    """Put such buffers of a model that was just built into the formats that they had when it was saved."""
    tensors = _real(model)
    if noted is None:
        _find_formats(model, tensors, fingerprint)
        return
    if not _readable(noted):
        raise FileFormatError(f"{path} is damaged: the formats of its buffers cannot be read.", where=path)
    for name, tensor in tensors.items():
        for kind in noted.get(name, ()):
            tensor.data = tensor.data.to(_FORMATS[kind])


def _readable(noted: Any) -> bool:
    return isinstance(noted, Mapping) and all(
        isinstance(kinds, Sequence) and all(isinstance(kind, str) and kind in _FORMATS for kind in kinds)
        for kinds in noted.values()
    )


def _real(model: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in unsaved(model).items() if _name(t.dtype) in _FORMATS}


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _rounded_to(tensor: Tensor) -> list[str]:
    """A narrower format that holds all numbers of a tensor, if there is one."""
    narrower = (kind for kind in _FORMATS.values() if kind.itemsize < tensor.dtype.itemsize)
    return [_name(kind) for kind in narrower if torch.equal(tensor.to(kind).to(tensor.dtype), tensor)][:1]


# -- files of older versions -------------------------------------------------------------------------------------------
def _find_formats(model: nn.Module, tensors: Mapping[str, Tensor], fingerprint: Any) -> None:
    """Older files do not say it. The output that they keep decides; without one, what transformers does."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(kinds) != 1 or not tensors:
        return
    kind = kinds.pop()
    rounded = {name: tensor.data.to(kind) for name, tensor in tensors.items()}
    stock = stock_formats(model, kind) if is_pretrained(model) else {}
    left = {name: tensor.data.to(stock.get(name, tensor.dtype)) for name, tensor in tensors.items()}
    choices = [left, rounded] if is_pretrained(model) else [rounded, left]
    said = fingerprint.get("answer") if isinstance(fingerprint, Mapping) else None

    def off(chosen: Mapping[str, Tensor]) -> float:
        _put(tensors, chosen)
        gap = distance(said, model) if isinstance(said, Mapping) else None
        return math.inf if gap is None else gap

    if any(left[name].dtype != rounded[name].dtype for name in tensors):
        choices.sort(key=off)  # equal ones stay in their order
    _put(tensors, choices[0])


def _put(tensors: Mapping[str, Tensor], data: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.data = data[name]
