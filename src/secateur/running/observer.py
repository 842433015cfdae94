"""Watching a model run: every torch function it calls, with the module that calls it.

Nothing is attached to the model. Functions are seen by a `TorchFunctionMode`; modules by a `Module._call_impl` that
notes which of them is running, and gives way to torch's own again when the observation ends.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode

from secateur.errors import UnknownOperationError, UnsupportedModelError
from secateur.nest import tensors_in
from secateur.ops.table import (
    Call,
    Decomposed,
    Function,
    Operation,
    Query,
    Site,
    function_name,
    in_order,
    lookup,
    overwrites,
)
from secateur.running.copies import named_modules, named_tensors
from secateur.running.sandbox import as_written


class Observer(TorchFunctionMode):
    """Context in which each call of a known operation reaches `observe`. Subclasses decide what to do with it.

    Functions without an entry reach `unknown`, which refuses them when a tensor for which `concerns` holds takes part.
    """

    #: Whether it may see a module that is one call of a function without the Python in between.
    shortcuts = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model, self._memories = model, dict[int, list[tuple[str, Tensor]]]()
        self._tour = named_modules(model)
        self._paths = {id(module): path for path, module in self._tour}
        self._stack: list[str] = []
        self._visits: dict[tuple[str, str], int] = {}
        self._quick: dict[type, Callable[[Any, Any], tuple[Any, ...] | None]] = {}

    def observe(self, call: Call) -> Any:
        """Run the call and learn from it; returns what the model gets to see."""
        return call.run()

    def present(
        self, operation: Operation | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor] | None]:
        """The arguments of a call as the operation shall see them, and the tensors among them if that is known."""
        return args, kwargs, None

    def passes_by(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A function that is not observed: it asks about a tensor, or has no entry."""

    def concerns(self, value: Any) -> bool:
        """Whether a tensor carries what this observer tracks, so that an unknown function on it must be refused."""
        return True

    @property
    def path(self) -> str:
        """Path of the innermost module that is running."""
        return self._stack[-1] if self._stack else ""

    def site(self, function: Function) -> Site:
        """The place of the next call of `function`."""
        key = path, name = self.path, function_name(function)
        visit = self._visits.get(key, 0)
        self._visits[key] = visit + 1
        return Site(path, name, visit)

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = lookup(func)
        if operation is not None and kwargs and not args:
            kwargs = in_order(func, kwargs)
        args, kwargs, tensors = self.present(operation, args, kwargs or {})
        if torch._C._functorch.maybe_current_level() is not None and (bare := _behind(tensors_in((args, kwargs)))):
            run = partial(func, *args, **kwargs)
            return self.transformed(func, bare, run) if any(map(self.concerns, bare)) else run()
        if _is_in_place(func) or overwrites(func, args, kwargs):
            self._spare((args or tuple(kwargs.values()))[:1])
        elif func in _TABLES and kwargs.get("max_norm") is not None:
            self._spare((args, kwargs))
        if kwargs and isinstance(kwargs.get("out"), Tensor):
            return self._written_out(func, args, kwargs)
        if operation is None:
            self.passes_by(func, args, kwargs)
            return self.unknown(func, args, kwargs)
        if isinstance(operation, Query):
            self.passes_by(func, args, kwargs)
            return func(*args, **kwargs)
        if isinstance(operation, Decomposed):
            with self.again():
                return operation.body(*args, **kwargs)
        return self.observe(Call(operation, func, args, kwargs, self.site(func), None, tensors))

    def _spare(self, written: Any) -> None:
        """If a call writes to a parameter, the copy that is watched gets its own before: it may share the user's."""
        with torch._C.DisableTorchFunction():  # another mode would show copies, whose memory is soon somebody else's
            if not self._memories:
                for name, parameter in named_tensors(self._model):
                    if isinstance(parameter, nn.Parameter) and parameter.layout == torch.strided:
                        self._memories.setdefault(parameter.untyped_storage()._cdata, []).append((name, parameter))
            for tensor in tensors_in(written):
                if tensor.layout == torch.strided:
                    met = self._memories.pop(tensor.untyped_storage()._cdata, [])
                    self.overwrites([name for name, _ in met])
                    if met and not tensor.is_meta:
                        _move([tensor, *(parameter for _, parameter in met)])

    def _written_out(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that writes its result into `out` is one that returns it, and a copy."""
        out = kwargs["out"]
        with self.again():
            made = func(*args, **{key: value for key, value in kwargs.items() if key != "out"})
            if out.shape != made.shape:  # torch resizes it
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    out.resize_(made.shape)
            return out.copy_(made)

    def overwrites(self, names: Sequence[str]) -> None:
        """A call is about to write to these parameters."""

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context in which calls are observed although we are inside a call (the mode is off there)."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def unknown(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function without an entry: harmless on tensors we do not track, refused otherwise."""
        tensors = tensors_in((args, kwargs))
        if not any(self.concerns(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        raise unknown_operation(self.site(func), tensors)

    def transformed(self, func: Function, tensors: Sequence[Tensor], run: Callable[[], Any]) -> Any:
        """A call inside `torch.vmap` or its like, on what is tracked: `tensors` are those behind its arguments."""
        raise _transforms(self.site(func))

    def __enter__(self) -> Self:
        self._written = as_written()
        self._written.__enter__()
        _watch(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        self._height = torch._C._len_torch_function_stack()
        self._quick = {kind: call for kind, call in _SHORTCUTS.items() if self.shortcuts and is_torchs_own(kind)}
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _forget(self)
        self._written.__exit__(*error)  # type: ignore[arg-type]
        self._stack.clear()

    def enter(self, module: nn.Module) -> None:
        """A module begins to run."""
        self._stack.append(self._paths.get(id(module), self.path))

    def leave(self) -> None:
        """The innermost module is done."""
        if self._stack:
            self._stack.pop()

    def runs(self, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module under observation. TorchScript is one call of a function that nobody knows."""
        if isinstance(module, torch.jit.ScriptModule):
            return self.scripted(partial(plain, module), args, kwargs)
        shortcut = self._quick.get(type(module)) if len(args) == 1 and not kwargs else None
        if shortcut is not None and is_plain(module) and torch._C._len_torch_function_stack() == self._height:
            with torch._C.DisableTorchFunction():
                call = shortcut(module, args[0])
                if call is not None:
                    return self.__torch_function__(call[0], (), call[1:])
        return plain(module, *args, **kwargs)

    def scripted(self, code: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run compiled code, inside which nothing can be watched."""
        with torch._C.DisableTorchFunction():
            return self.__torch_function__(torchscript, (), (code, *args), kwargs)

    def applies(self, function: type[Any], plain: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a `torch.autograd.Function` under observation. What its forward calls is observed in any case."""
        return plain(*args, **kwargs)


#: Write to their table if they have a `max_norm`.
_TABLES = frozenset((F.embedding, F.embedding_bag))
_ASSIGNMENTS = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__",
     "__ipow__", "__iand__", "__ior__", "__ixor__")
)  # fmt: skip


@cache
def _is_in_place(func: Function) -> bool:
    """Whether a function, which the table may not know, writes to its first argument, by torch's rule for names."""
    name = getattr(func, "__name__", "")
    return name in _ASSIGNMENTS or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


def _move(tensors: Sequence[Tensor]) -> None:
    """Give tensors that share their memory a copy of it."""
    own = tensors[0].untyped_storage().clone()  # type: ignore[no-untyped-call]
    for item in {id(item): item for item in tensors}.values():
        item.data = item.detach().new_empty(0).set_(own, item.storage_offset(), item.shape, item.stride())


def torchscript(code: Function, *args: Any, **kwargs: Any) -> Any:
    """Stands for compiled code in the table of operations, where it has no entry."""
    return code(*args, **kwargs)


def unknown_operation(site: Site, tensors: Sequence[Tensor]) -> UnknownOperationError:
    """The refusal of a function without an entry."""
    shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
    return UnknownOperationError(
        f"secateur has no entry for {site}, called on tensors of shape {shapes}. It will not guess what "
        "the function does to channels and relevance.",
        fix="register an entry with `secateur.ops.register(...)` (see the how-to 'Register an operation'), "
        "or replace the call in the model",
    )


def _behind(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors behind those of a call by `torch.vmap` or its like, which hide a dimension; none for other calls."""
    bare = [_bare(tensor) for tensor in tensors]
    return [] if all(a is b for a, b in zip(tensors, bare, strict=True)) else bare


def _bare(tensor: Tensor) -> Tensor:
    """The tensor behind the wrappers of `torch.func`."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


# Torch 2.6 does not say whether there are hooks on saved tensors.
_hooks_on_saved = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _transforms(site: Site) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{site} runs inside torch.vmap or another transform of torch.func, whose tensors hide dimensions, so that "
        "units and relevance cannot be followed.",
        fix="write the function for whole batches",
    )


def refuse_transform(site: Site) -> None:
    """Refuse a call whose derivative is a rule or is noted, inside a transform of `torch.func`."""
    if torch._C._functorch.maybe_current_level() is not None:
        raise _transforms(site)


def refuse_checkpoint(site: Site) -> None:
    """Refuse gradient checkpointing, which runs a part again in the backward pass, where nobody watches it."""
    if torch.is_grad_enabled() and _hooks_on_saved is not None and _hooks_on_saved(False) is None:
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise UnsupportedModelError(
                f"{site} runs under gradient checkpointing, and a second time in the backward pass.",
                fix="switch checkpointing off, e.g. model.gradient_checkpointing_disable()",
            )
        frame = frame.f_back


def refuse_autocast(site: Site) -> None:
    """Refuse autocast inside a forward: it changes number formats between what is seen and what is computed."""
    if torch._C._is_any_autocast_enabled():
        raise UnsupportedModelError(
            f"{site} runs under torch.autocast, which the forward switches on: relevance cannot follow its casts.",
            fix="switch it off in the forward and let the caller decide, or another criterion, such as 'taylor'",
        )


class _Thread(threading.local):
    """The observers of this thread, the innermost last."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []


_thread = _Thread()
_lock = threading.Lock()
_watching = 0  # observers in all threads: the first one changes torch, and the last one changes it back
_fastpath = True  # of attention, which makes no calls that could be seen
_plain: Callable[..., Any] = nn.Module._call_impl
_apply: Any = inspect.getattr_static(torch.autograd.Function, "apply")
_SCRIPT: Any = torch.jit.ScriptFunction
_compiled: Callable[..., Any] = _SCRIPT.__call__


def _observed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A `Module._call_impl` that tells this thread's observer what runs. (Global hooks take three times as long.)"""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _thread.observers:
            return plain(module, *args, **kwargs)
        observer = _thread.observers[-1]
        observer.enter(module)
        try:
            return observer.runs(module, plain, args, kwargs)
        finally:
            observer.leave()

    return call


@classmethod  # type: ignore[misc]
def _applied(function: type[Any], *args: Any, **kwargs: Any) -> Any:
    """`Function.apply`, of which this thread's observer decides."""
    plain = _apply.__get__(None, function)
    return _thread.observers[-1].applies(function, plain, args, kwargs) if _thread.observers else plain(*args, **kwargs)


def _scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a TorchScript function, which torch shows to no mode. Where operations are followed, its source runs
    instead, if torch knows it. (Compiled code rounds otherwise, so this is not done where numbers are compared.)"""
    if not _thread.observers or not torch._C._is_torch_function_mode_enabled():
        return _compiled(function, *args, **kwargs)
    source = getattr(function, "_torchdynamo_inline", None)
    if source is not None and _thread.observers[-1].shortcuts:
        return source(*args, **kwargs)
    return _thread.observers[-1].scripted(partial(_compiled, function), args, kwargs)


def _watch(observer: Observer) -> None:
    global _watching, _plain, _apply, _fastpath
    _thread.observers.append(observer)
    with _lock:
        _watching += 1
        if _watching == 1:
            _plain = nn.Module._call_impl
            nn.Module._call_impl = _observed(_plain)  # type: ignore[method-assign]
            _apply = inspect.getattr_static(torch.autograd.Function, "apply")
            torch.autograd.Function.apply = _applied
            _SCRIPT.__call__ = _scripted
            _fastpath = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)


def _forget(observer: Observer) -> None:
    global _watching
    _thread.observers.remove(observer)
    with _lock:
        _watching -= 1
        if not _watching:
            nn.Module._call_impl = _plain  # type: ignore[method-assign]
            torch.autograd.Function.apply = _apply
            _SCRIPT.__call__ = _compiled
            torch.backends.mha.set_fastpath_enabled(_fastpath)


def is_plain(module: nn.Module) -> bool:
    """Whether calling a module means running the forward of its class, and nothing else."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
        or "forward" in module.__dict__
        or "_conv_forward" in module.__dict__
    )


def is_torchs_own(kind: Any) -> bool:
    """Whether a class of torch has the forward that torch wrote: people replace it, for all layers at once."""
    parts = [kind.forward, *([kind._conv_forward] if hasattr(kind, "_conv_forward") else [])]
    return all(getattr(part, "__globals__", {}).get("__name__", "").startswith("torch.nn.") for part in parts)


def weight_and_bias(module: nn.Module) -> tuple[Tensor | None, Tensor | None] | None:
    """What a layer calls so, if both are its parameters, else None: people make buffers of them, too."""
    own, state = module._parameters, module.__dict__
    if "weight" not in own or "bias" not in own or "weight" in state or "bias" in state:
        return None
    return own["weight"], own["bias"]


def _convolution(module: Any, x: Any) -> tuple[Any, ...] | None:
    own = weight_and_bias(module)
    if own is None or own[0] is None or module.padding_mode != "zeros":
        return None
    return _CONVOLUTIONS[type(module)], x, *own, module.stride, module.padding, module.dilation, module.groups


def _linear(module: Any, x: Any) -> tuple[Any, ...] | None:
    own = weight_and_bias(module)
    return None if own is None or own[0] is None else (F.linear, x, *own)


def _batch_norm(module: Any, x: Any) -> tuple[Any, ...] | None:
    own = weight_and_bias(module)
    mean, variance = module._buffers.get("running_mean"), module._buffers.get("running_var")
    if module.training or own is None or mean is None or variance is None:
        return None
    module._check_input_dim(x)
    return F.batch_norm, x, mean, variance, *own, False, 0.0, module.eps


def _activation(module: Any, x: Any) -> tuple[Any, ...] | None:
    return _ACTIVATIONS[type(module)], x, module.inplace


_CONVOLUTIONS: dict[type, Function] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_ACTIVATIONS: dict[type, Function] = {
    nn.ReLU: F.relu, nn.Hardswish: F.hardswish, nn.Hardsigmoid: F.hardsigmoid, nn.SiLU: F.silu
}  # fmt: skip
#: The call that a module of exactly this type makes, function first; None if not this time.
_SHORTCUTS: dict[type, Callable[[Any, Any], tuple[Any, ...] | None]] = {
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    nn.Linear: _linear,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    **dict.fromkeys(_ACTIVATIONS, _activation),
}


class Rehearsal(Observer):
    """Runs a model on tensors without numbers, faster than torch would."""

    shortcuts = True

    def observe(self, call: Call) -> Any:
        return call.operation.rehearse(call)

    def concerns(self, value: Any) -> bool:
        return False  # nothing is tracked, so nothing is refused
