"""The training mode: whether code asks for it. Then training may do something else, which is watched and verified."""

from __future__ import annotations

import inspect
from functools import cache
from types import CodeType
from typing import Any

from torch import nn

from secateur.running.copies import named_modules

#: Torch's own modules and torchvision's building blocks ask only to drop numbers, and so do its DenseNets. Nobody sees
#: what other code does with the answer, not even by watching one forward: it may ask in another way, or another time.
_ONLY_DROP = ("torch.nn.", "torchvision.ops.", "torchvision.models.densenet")


def reads_training(model: nn.Module) -> bool:
    """Whether code names the mode for anything but dropout."""
    kinds: set[Any] = {kind for _, module in named_modules(model) for kind in type(module).__mro__}
    return any(map(_kind_reads_training, kinds))


def module_reads_training(module: nn.Module) -> bool:
    """Whether a module's own code names the mode."""
    return any(map(_kind_reads_training, type(module).__mro__))


@cache
def _kind_reads_training(kind: type) -> bool:
    if kind.__module__.startswith(_ONLY_DROP):
        return False
    own = vars(kind)
    if kind is not nn.Module and not own.keys().isdisjoint(("train", "eval")):  # they may note the mode elsewhere
        return True
    functions = [getattr(item, "fget", None) or getattr(item, "func", item) for item in own.values()]
    return any(_names_training(getattr(inspect.unwrap(f), "__code__", None)) for f in functions if callable(f))


def _names_training(code: CodeType | None) -> bool:
    if code is None:
        return False
    names = "training" in code.co_names or "training" in code.co_consts  # the latter as in `getattr(self, "training")`
    return names or any(_names_training(c) for c in code.co_consts if isinstance(c, CodeType))
