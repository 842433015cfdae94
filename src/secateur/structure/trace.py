"""What every call of a forward pass did, so that a smaller model's forward can be compared with it, without numbers.

Three things show that code depends on a size in a way that masking does not: a number that the code computes with
changes (`x / x.shape[1]`), a call makes another shape than its labels foretell, or other calls are made.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.nest import tensors_in
from secateur.ops.layers import Layers, Mask, varying
from secateur.ops.table import Call, Function, Site
from secateur.running.copies import named_modules
from secateur.running.heads import is_windowed
from secateur.running.observer import Rehearsal
from secateur.structure.followed import Followed, plain

#: Functions that make tensors of plain numbers, and which of their arguments these are.
MAKERS: dict[Function, slice] = {
    torch.tensor: slice(0, 1),
    torch.as_tensor: slice(0, 1),
    torch.scalar_tensor: slice(0, 1),
    torch.full: slice(1, 2),
    torch.linspace: slice(0, 2),
    Tensor.new_tensor: slice(1, 2),
    Tensor.new_full: slice(2, 3),
}
Shape = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Step:
    """One call: the plain numbers that it computed with, and the shape and the layers of each tensor that it made."""

    numbers: tuple[Any, ...]
    made: tuple[tuple[Shape, Layers], ...] = ()

    def shapes(self, gone: Mask, known: Known) -> list[Shape | None]:
        """The shape of each tensor without the labels in `gone`; None for a tensor that carries none."""
        return [_without(shape, layers, gone, known) if layers else None for shape, layers in self.made]


#: How many labels are left along the dimensions of a layer, by where it lies in memory: many tensors share one.
Known = dict[tuple[int, tuple[int, ...]], list[int]]


def _without(shape: Shape, layers: Layers, gone: Mask, known: Known) -> Shape:
    sizes = list(shape)
    for layer in layers:
        over = varying(layer)
        key = layer.data_ptr(), tuple([n for d in over for n in (layer.shape[d], layer.stride(d))])
        counts = known.get(key)
        if counts is None:
            own = layer.as_strided([layer.shape[d] for d in over], [layer.stride(d) for d in over])
            kept, dims = ~gone[np.abs(own.numpy())], range(len(over))
            counts = known[key] = [int(np.count_nonzero(kept.any(tuple(e for e in dims if e != d)))) for d in dims]
        for dim, count in zip(over, counts, strict=True):
            sizes[dim] = min(sizes[dim], count)
    return tuple(sizes)


def numbers_of(call: Call) -> tuple[Any, ...]:
    """The plain numbers that a call computes with. Whole ones may be sizes and places; others never are."""
    return _numbers((call.args, call.kwargs), _ANY if call.operation.scalars else _BROKEN)


def numbers_made(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The plain numbers of which a function without an entry makes a tensor."""
    which = MAKERS.get(function)
    given = kwargs.get("data", kwargs.get("fill_value"))
    return () if which is None else _numbers((args[which], given), _ANY)


_ANY, _BROKEN = frozenset({int, float}), frozenset({float})
#: Types of most arguments that are no numbers to compute with, or not in these kinds.
_NO_NUMBERS = frozenset({Tensor, nn.Parameter, bool, int, float, str, type(None)})


def _numbers(values: Any, kinds: Collection[type]) -> tuple[Any, ...]:
    found: list[Any] = []
    for value in values.values() if isinstance(values, dict) else values:
        kind = type(value)
        if kind in kinds:
            found.append(value)
        elif kind in _NO_NUMBERS:
            continue
        elif isinstance(value, (tuple, list, dict)) and value:
            found.extend(_numbers(value, kinds))
        elif isinstance(value, Followed):  # a cache kept it from an earlier forward
            found.extend(_numbers([plain(value)], kinds))
    return tuple(found)


class Comparison(Rehearsal):
    """Rehearses a smaller model, and notes in `difference` the first call that does what labels do not foretell."""

    def __init__(
        self, model: nn.Module, steps: dict[Site, Step], gone: Mask, others: Collection[str] = (), loose: bool = False
    ) -> None:
        """`others`: paths of modules whose smaller version makes other calls by design. `loose`: numbers decide shapes
        and calls, so that only the numbers that the code computes with are compared."""
        super().__init__(model)
        self.difference: str | None = None
        self._steps, self._gone, self._others, self._loose = steps, gone, others, loose
        self._seen: set[Site] = set()
        self._known: Known = {}

    def observe(self, call: Call) -> Any:
        output = super().observe(call)
        self._compare(call.site, numbers_of(call), output)
        return output

    def unknown(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().unknown(func, args, kwargs)
        if func not in MAKERS and tensors_in((args, kwargs)):
            self._compare(self.site(func), _numbers((args, kwargs), _BROKEN), output)
        return output

    def passes_by(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in MAKERS:
            self._compare(self.site(func), numbers_made(func, args, kwargs), None)

    def _compare(self, site: Site, numbers: tuple[Any, ...], output: Any) -> None:
        if self.difference is not None or site.path in self._others:
            return
        step = self._steps.get(site)
        self._seen.add(site)
        if step is None:
            if not self._loose:
                self.difference = f"the forward calls {site} only when it has another size"
        elif step.numbers != numbers:
            self.difference = f"its size is used as a number in {site}"
        elif output is not None and not self._loose:
            for made, wanted in zip(tensors_in(output), step.shapes(self._gone, self._known), strict=False):
                if wanted is not None and not _fits(made, wanted):
                    self.difference = (
                        f"a size is written into the forward ({site} makes {tuple(made.shape)} instead of {wanted})"
                    )

    def finish(self) -> str | None:
        """The first difference. Calls that were not made count as well."""
        missing = [site for site in self._steps if site not in self._seen and site.path not in self._others]
        if self.difference is None and missing and not self._loose:
            return f"the forward does not call {missing[0]} when it has another size"
        return self.difference


def _fits(made: Tensor, wanted: Shape) -> bool:
    """Whether a tensor has this shape. Copies along a dimension in which it is expanded are as many as are needed."""
    if made.ndim != len(wanted):
        return False
    return all(a == b or not s for a, b, s in zip(made.shape, wanted, made.stride(), strict=True))


def remade(model: nn.Module) -> set[str]:
    """Paths of modules whose smaller version makes other calls: torch's own attention, and torchvision's."""
    modules = named_modules(model)
    return {path for path, module in modules if isinstance(module, nn.MultiheadAttention) or is_windowed(module)}
