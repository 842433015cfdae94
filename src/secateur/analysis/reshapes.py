"""Which calls of `view` and `reshape` in the source of a model carry units, and along which dimensions."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from secateur.analysis.variants import other_sizes
from secateur.ops.layers import Labels, varying
from secateur.ops.shape import Reshape
from secateur.ops.table import Call, Site
from secateur.running.copies import copy_with, named_modules
from secateur.running.observer import Rehearsal
from secateur.running.sandbox import Example, quiet, run
from secateur.structure.graph import RepeatedSize
from secateur.structure.trace import Step
from secateur.surgery.written_sizes import name_of, resize, resized_forward

log = logging.getLogger("secateur")


#: A call of a forward: the path of the module, which call of its source, and what shape it made.
Made = tuple[str, int, tuple[int, ...]]


class _Located(Rehearsal):
    """Notes which call of the source of a forward a reshape is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.found: dict[Site, Made] = {}
        self._next: tuple[str, int] | None = None

    def note(self, path: str, call: int) -> None:
        self._next = path, call

    def observe(self, call: Call) -> Any:
        place, self._next = self._next, None
        output = super().observe(call)
        if place is not None and type(call.operation) is Reshape:
            self.found[call.site] = *place, tuple(output.shape)
        return output


def _located(model: nn.Module, inputs: Example) -> dict[Site, Made] | None:
    """Where the reshapes of a forward are in its source. None if it does not run."""
    copy = copy_with(model, lambda name, tensor: tensor.detach())
    located = _Located(copy)
    for path, module in named_modules(copy):
        if resize(module, {}) and (forward := resized_forward(module)) is not None:
            forward.note = partial(located.note, path)
    try:
        with quiet(), located:
            run(copy, inputs)
    except Exception as error:
        log.debug("no forward from its source for %s: %s", type(model).__name__, error)
        return None
    return located.found


def sized_calls(model: nn.Module, inputs: Example, steps: dict[Site, Step]) -> dict[tuple[str, str], RepeatedSize]:
    """The sizes of reshapes that belong to units, by the module in whose source they are, and their name there.

    Where units and places of an image are mixed, a size that is the same for another image counts as well.
    """
    here = _located(model, inputs) or {}
    others = (_located(model, x) for x in other_sizes(inputs)) if here else ()
    other = next((made for made in others if made), dict[Site, Made]())
    found, odd = dict[tuple[str, str], RepeatedSize](), set[tuple[str, str]]()
    for site, (path, call, shape) in here.items():
        elsewhere = other[site][2] if site in other else shape
        for layer in (layer for _, layers in steps[site].made for layer in layers) if site in steps else ():
            over = varying(layer)
            grid: Labels = abs(
                layer.as_strided([layer.shape[d] for d in over], [layer.stride(d) for d in over]).numpy()
            )
            for position, d in enumerate(over):
                rows: Labels = np.moveaxis(grid, position, 0).reshape(shape[d], -1)
                key = path, name_of((call, d))
                if shape[d] != elsewhere[d] or len(found.get(key, RepeatedSize(*key, rows)).labels) != shape[d]:
                    odd.add(key)
                found.setdefault(key, RepeatedSize(*key, rows))
    return {key: item for key, item in found.items() if key not in odd}
