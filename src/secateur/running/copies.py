"""Copies of a model: independent ones, ones that share parameters, and ones without numbers (on the meta device)."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.weak import WeakTensorKeyDictionary

from secateur.errors import UnsupportedModelError

# Parameters that a forward was seen to write to, as an embedding with `max_norm` does. Copies have their own of these.
_WRITTEN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def never_share(model: nn.Module, names: Collection[str]) -> None:
    """Remember that the forward writes to these parameters."""
    for name, tensor in named_tensors(model) if names else ():
        if name in names:
            _WRITTEN[tensor] = True


def with_same_memory(tensor: Tensor) -> Tensor:
    """The tensor for a copy of a model, which shares its memory unless the forward writes to it."""
    return tensor.detach().clone() if _WRITTEN and tensor in _WRITTEN else tensor.detach()


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module behind `torch.compile` or DataParallel wrappers.

    If parts of it are compiled, this is a view of it with the same tensors, in which they are not.
    """
    given: object = model
    if not isinstance(given, nn.Module):
        hint = "call it first" if callable(given) else "build the network and load its weights first"
        if isinstance(getattr(given, "model", None), nn.Module):
            hint = "result.model"
        raise UnsupportedModelError(f"the model is a {type(given).__name__}, not an nn.Module.", fix=hint)
    model = _inner(model)
    modules = named_modules(model)
    if any("_orig_mod" in module._modules for _, module in modules):
        return _copied_plain(model, {id(tensor): tensor for _, tensor in named_tensors(model)}, modules)
    return model


def _inner(model: nn.Module) -> nn.Module:
    """What the wrappers of a module are around."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def check_followed(model: nn.Module, strict: bool = False) -> None:
    """Refuse what nobody can watch: a compiled model (`strict`: or part), layers without a size, too deep nesting."""
    if any(kind.__module__ == "ultralytics.engine.model" for kind in type(model).__mro__):
        what = f"{type(model).__name__} is no network but what trains, runs and exports one."
        raise UnsupportedModelError(what, fix="its `.model`, as in prune(yolo.model, …)")
    modules = named_modules(model)
    for path, module in modules if strict or _is_odd(model, modules) else ():
        name = f"`{path}`" if path else type(model).__name__
        parts = _parts(module) if strict else [] if path else [module]
        if any(isinstance(part, torch.jit.ScriptModule | torch.jit.ScriptFunction) for part in parts):
            raise UnsupportedModelError(
                f"{name} is TorchScript: its code is compiled and cannot be followed.",
                fix="the Python code that it was made from",
            )
        if ".quantized" in type(module).__module__ and not any(True for _ in model.parameters()):
            raise UnsupportedModelError(
                f"{name} is quantised: its weights are packed whole numbers, of which no unit can be taken.",
                fix="prune the model in floating point, then quantise the smaller one",
            )
        if any(p is not None and nn.parameter.is_lazy(p) for p in module._parameters.values()):
            raise UnsupportedModelError(
                f"{name} is lazy: its weights have no size before the model has run.", fix="run the model once"
            )
        if _FRAMES * (path.count(".") + 1) > sys.getrecursionlimit() - 200:
            raise UnsupportedModelError(
                f"{name} is nested too deeply for Python's stack.", fix="sys.setrecursionlimit(10_000)"
            )
    for name, tensor in named_tensors(model):
        if tensor.layout != torch.strided:
            raise UnsupportedModelError(
                f"`{name}` is stored as {tensor.layout}, of which no unit can be cut.", fix="tensor.to_dense()"
            )


def _is_odd(model: nn.Module, modules: list[tuple[str, nn.Module]]) -> bool:
    """Whether something may have to be refused: kinds and depths are fewer than modules."""
    kinds = {type(module) for _, module in modules}
    held = {type(p) for _, module in modules if (own := module._parameters) for p in own.values()}
    deepest = max([path.count(".") for path, _ in modules]) + 1
    return (
        isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction)
        or any(".quantized" in kind.__module__ for kind in kinds)
        or not held <= {nn.Parameter, type(None)}
        or _FRAMES * deepest > sys.getrecursionlimit() - 200
    )


#: The calls that Python makes for each level of modules while the model is watched, and some to spare.
_FRAMES = 6


def _parts(module: nn.Module) -> list[object]:
    return [module, *(value for name, value in vars(module).items() if name not in _OWN_STATE)]


def copy_with(model: nn.Module, tensor: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A deep copy in which `tensor(name, old)` supplies every parameter and buffer. Tied ones stay tied."""
    memo: dict[int, Any] = {}
    modules = named_modules(model)
    for name, old in named_tensors(model):
        new = tensor(name, old)
        if new.is_inference():
            new = new.clone()  # what was made in inference mode can take no part in a gradient
        if type(old) is nn.Parameter or isinstance(old, nn.Parameter):  # (torch's own check takes a microsecond)
            new = nn.Parameter(new, requires_grad=old.requires_grad)
            if marks := vars(old):  # that training reads, such as `_no_weight_decay`
                vars(new).update(marks)
            if _WRITTEN and old in _WRITTEN:
                _WRITTEN[new] = True
        memo[id(old)] = new
    return _copied_plain(model, memo, modules)


def _copied_plain(model: nn.Module, memo: dict[int, Any], modules: list[tuple[str, nn.Module]]) -> nn.Module:
    """A copy with the tensors of the memo, whose parts are not compiled."""
    try:
        made = _copied(model, memo, [module for _, module in modules])
    except (RuntimeError, TypeError, ValueError, pickle.PickleError) as error:
        fix = "keep non-leaf tensors and open resources out of its attributes, or detach() them"
        hooks = [hook for _, module in modules for hook in module._forward_pre_hooks.values()]
        if any(isinstance(hook, BasePruningMethod | WeightNorm) for hook in hooks):
            fix = "make its weights plain parameters first: torch.nn.utils.prune.remove, or remove_weight_norm"
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be copied ({error}). secateur never changes your model, so it "
            "works on copies.",
            fix=fix,
        ) from error
    compiled = any("_orig_mod" in module._modules for _, module in modules)
    for _, module in named_modules(made) if compiled else ():
        for name, child in module._modules.items():
            if child is not None and "_orig_mod" in child._modules:
                setattr(module, name, _inner(child))
    return _inner(made)


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """`model.named_modules()` without its nested generators, which take as long as the work on a deep model."""
    if (known := _unchanged.tours.get(id(model))) is not None:
        return known.modules
    found: list[tuple[str, nn.Module]] = [("", model)]
    seen: set[int] = {id(model)}
    waiting: list[tuple[str, Iterator[tuple[str, nn.Module | None]]]] = [("", iter(model._modules.items()))]
    while waiting:
        prefix, children = waiting[-1]
        for name, child in children:
            if child is None or id(child) in seen:
                continue
            seen.add(id(child))
            path = prefix + name
            found.append((path, child))
            if inside := child._modules:
                waiting.append((f"{path}.", iter(inside.items())))
                break
        else:
            waiting.pop()
    return found


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, then buffers, each under the name it is first met by."""
    if (known := _unchanged.tours.get(id(model))) is not None:
        return known.tensors
    return tensors_of(named_modules(model))


def named_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters alone."""
    return tensors_of(named_modules(model), ("_parameters",))


def tensors_of(
    modules: Sequence[tuple[str, nn.Module]], kinds: Sequence[str] = ("_parameters", "_buffers")
) -> list[tuple[str, Tensor]]:
    """`named_tensors` of a model whose modules are known."""
    seen: set[int] = set()
    found: list[tuple[str, Tensor]] = []
    for own in kinds:
        for path, module in modules:
            held = module.__dict__.get(own)
            if held is None:
                held = getattr(module, own)  # TorchScript keeps them elsewhere
            if held:
                prefix = f"{path}." if path else ""
                for name, tensor in held.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        found.append((prefix + name, tensor))
    return found


class _Tour:
    """The modules and tensors of a model that does not change meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules = model, named_modules(model)

    @cached_property
    def tensors(self) -> list[tuple[str, Tensor]]:
        return tensors_of(self.modules)


class _Unchanged(threading.local):
    def __init__(self) -> None:
        self.tours: dict[int, _Tour] = {}


_unchanged = _Unchanged()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """While no module or tensor of a model is replaced, it is walked once. This thread only works on copies of it."""
    if id(model) in _unchanged.tours:
        yield
        return
    _unchanged.tours[id(model)] = _Tour(model)
    try:
        yield
    finally:
        del _unchanged.tours[id(model)]


# Values that a copy may share with the original.
_IMMUTABLE = frozenset(
    (int, float, complex, bool, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size,
     torch.jit.ScriptFunction)
)  # fmt: skip
# What torch's own modules do when they are unpickled changes nothing in an instance that is complete.
_KNOWN_SETSTATE = {
    kind.__setstate__
    for kind in (nn.Module, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.TransformerEncoderLayer)
}
_KNOWN_GETSTATE = {object.__getstate__, nn.Module.__getstate__}
_OWN_STATE = frozenset(vars(nn.Module()))
# The compiled call of `module.compile()`: torch leaves it out of copies too.
_COMPILED = "_compiled_call_impl"


def _copied(model: nn.Module, memo: dict[int, Any], modules: list[nn.Module]) -> nn.Module:
    """`copy.deepcopy`, several times faster: most of what a module holds is empty or immutable."""
    if not all(map(_is_plain, {type(module) for module in modules})):
        return _copied_deeply(model, modules, memo)
    for module in modules:  # all are made before any is filled, so that cycles find their ends
        memo[id(module)] = object.__new__(type(module))
    for module in modules:
        own, state = module.__dict__, memo[id(module)].__dict__
        state.update(own)
        for key, value in own.items():
            kind = type(value)
            if kind in _IMMUTABLE:
                continue
            if (kind is dict or kind is OrderedDict) and key in _OWN_STATE:
                # Parameters, buffers and modules are in the memo; of hooks there are seldom any.
                made = state[key] = {} if kind is dict else OrderedDict()
                if value:
                    for name, item in value.items():
                        made[name] = memo[id(item)] if id(item) in memo else copy.deepcopy(item, memo)
            elif key in _OWN_STATE and kind is set:  # names of buffers
                state[key] = set(value)
            elif (kind is tuple or kind is list) and _IMMUTABLE.issuperset(map(type, value)):
                if kind is list and id(value) not in memo:
                    memo[id(value)] = list(value)
                state[key] = memo.get(id(value), value)
            elif key != _COMPILED:
                state[key] = copy.deepcopy(value, memo)
        state.pop(_COMPILED, None)
    whole: nn.Module = memo[id(model)]
    return whole


def _copied_deeply(model: nn.Module, modules: list[nn.Module], memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy`. Functions of TorchScript are shared, and the parameters of its modules stay leaves."""
    parts = [part for module in modules for part in _parts(module)]
    memo |= {id(part): part for part in parts if isinstance(part, torch.jit.ScriptFunction)}
    with torch.no_grad():
        made = copy.deepcopy(model, memo)
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        for old, new in zip(model.parameters(), made.parameters(), strict=True):
            new.requires_grad_(old.requires_grad)
    return made


def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether instances are nothing but their `__dict__`, copied the way every object is."""
    default = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    known = kind.__getstate__ in _KNOWN_GETSTATE and kind.__setstate__ in _KNOWN_SETSTATE
    slots = any(getattr(parent, "__slots__", ()) for parent in kind.__mro__)
    return default and known and not slots and not hasattr(kind, "__deepcopy__")


#: What `model.train()` goes through. Classes have their own of these, and instances too: so people freeze batch norms.
_MODAL: dict[str, Any] = {
    name: getattr(nn.Module, name) for name in ("train", "eval", "__setattr__", "children", "named_children")
}


def set_mode(model: nn.Module, training: bool = False) -> nn.Module:
    """`model.train(training)`, which takes a function call and a search of three tables for each module."""
    modules = [module for _, module in named_modules(model)]
    kinds: set[Any] = {type(module) for module in modules}
    plain = all(all(getattr(kind, name) is own for name, own in _MODAL.items()) for kind in kinds)
    if plain and not any(name in module.__dict__ for module in modules for name in _MODAL):
        for module in modules:
            if "training" in module.__dict__:
                module.__dict__["training"] = training
            else:
                module.training = training
        return model
    return model.train(training) if training else model.eval()


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy on the meta device: shapes without numbers. Integer buffers keep theirs, since they steer indexing."""

    def empty(name: str, old: Tensor) -> Tensor:
        if not old.is_floating_point() and not old.is_complex():
            return old.detach().clone()
        if 0 in old.stride():  # an expanded buffer: each place is one of its own to us
            return torch.empty(old.shape, dtype=old.dtype, device="meta")
        return torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="meta")

    return copy_with(model, empty)


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy that shares the parameters' memory but owns its buffers, flags and structure."""
    return copy_with(
        model, lambda name, old: with_same_memory(old) if isinstance(old, nn.Parameter) else old.detach().clone()
    )
