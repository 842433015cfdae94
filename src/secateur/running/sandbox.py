"""Running a user's model without leaving a trace: mode, random numbers and compiled parts stay as they were."""

from __future__ import annotations

import gc
import inspect
import random
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, wraps
from itertools import islice
from types import MethodType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import set_stance

from secateur.errors import ForwardError, NotFiniteError, UnsupportedModelError
from secateur.nest import Images, describe, map_tensors, tensors_in
from secateur.running.copies import (
    check_followed,
    named_modules,
    named_parameters,
    named_tensors,
    set_mode,
    tensors_of,
    unwrap,
)
from secateur.running.devices import dtype_of

#: What a model is called on: a tensor, a tuple of positional inputs, or a mapping of named inputs.
Example = Any
# How torch complains of number formats, and what converts to which.
_FORMATS = re.compile(r"dtype|datatype|scalar type|Input type")
_CASTS = {torch.float32: "float", torch.float64: "double", torch.float16: "half", torch.bfloat16: "bfloat16"}


P = ParamSpec("P")
R = TypeVar("R")


def leaves_no_trace(function: Callable[P, R]) -> Callable[P, R]:
    """For public functions: what is set around the call neither changes its results nor is changed by it.

    Random numbers that are drawn inside are given back, those that a shuffling DataLoader draws included. Inference
    mode, autocast and a meta default device do not apply inside.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as stack:
            stack.enter_context(_outermost)
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if torch.empty(0).is_meta:  # (torch 2.6 cannot tell the default device once it was given back)
                stack.enter_context(torch.device("cpu"))
            return function(*args, **kwargs)

    return call


class RandomState:
    """The state of all random number generators that a user's code may draw from."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.cpu, self.python, self.numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self.cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def has_moved(self) -> bool:
        """Whether anything was drawn on the processor since."""
        now = RandomState([])
        same = self.python == now.python and all(map(np.array_equal, self.numpy, now.numpy))
        return not (same and torch.equal(self.cpu, now.cpu))

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        for device, state in self.cuda:
            torch.cuda.set_rng_state(state, device)


class _Shared:
    """A context that the first call of all threads enters, and the last one leaves.

    What it changes belongs to all threads. If each gave back what it found, that could be another one's doing.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make, self._lock, self._depth = make, threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._held = self._make()
                self._held.__enter__()
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._held.__exit__(None, None, None)


def _cuda_devices() -> list[int]:
    used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return list(range(torch.cuda.device_count())) if used else []


@contextmanager
def drawing_again() -> Iterator[None]:
    """All random number generators as they were before."""
    state = RandomState(_cuda_devices())
    try:
        yield
    finally:
        state.restore()


#: Random numbers that are drawn in public functions are given back, and compiled parts run there as they are written.
_outermost = _Shared(drawing_again)
_as_written = _Shared(lambda: set_stance("force_eager"))


def as_written() -> AbstractContextManager[Any]:
    """Compiled functions run as they are written. There are none before torch's compiler is loaded, which is slow."""
    return _as_written if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _uncollected() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


#: No search for garbage meanwhile: copies of a model are many small objects, whose number would start it, and one look
#: at all that a process has imported takes as long as an analysis. For short calls that make no large cycles.
uncollected = _Shared(_uncollected)


@contextmanager
def isolated(model: nn.Module, entries: Sequence[Tensor]) -> Iterator[None]:
    """Evaluation mode, gradients on, compiled parts run as written, random numbers given back."""
    used = [*entries, *islice(model.parameters(), 1)]  # a model may draw although its inputs are no entries
    with evaluating(model), torch.inference_mode(False), torch.enable_grad(), _as_written, forked(used):
        yield


def parts_of(given: object) -> list[Any]:
    """The modules of a model; another object itself, or that of a method, if it has attributes."""
    owner = given.__self__ if isinstance(given, MethodType) else given
    if isinstance(owner, nn.Module):
        return list(owner.modules())
    return [owner] if isinstance(getattr(owner, "__dict__", None), dict) else []


@contextmanager
def unmoved(model: object) -> Iterator[None]:
    """All tensors and attributes are as before afterwards: forwards write to buffers, some to weights, as an encoder
    that follows another one, and some keep what has no gradients here, or count their calls."""
    parts = parts_of(model)
    attributes = [(vars(part), dict(vars(part))) for part in parts]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    places: list[dict[str, Any]] = [own for m in modules for own in (m._parameters, m._buffers)]
    held = [(own, name, tensor) for own in places for name, tensor in own.items() if tensor is not None]
    before = [tensor.detach().clone() for _, _, tensor in held]
    try:
        yield
    finally:
        for own, known in attributes:
            for name in own.keys() - known.keys():
                del own[name]
            own.update(known)
        with torch.no_grad():
            for (owner, name, tensor), value in zip(held, before, strict=True):
                if tensor.shape != value.shape:  # a buffer that grows in place
                    tensor.data = value
                elif not torch.equal(tensor, value):  # a write would count, and an expanded tensor bears none
                    tensor.copy_(value)
                owner[name] = tensor


@contextmanager
def forked(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Random numbers that are drawn inside are given back, on the CPU and on the devices of these tensors."""
    state = RandomState(sorted({t.device.index or 0 for t in tensors if t.is_cuda}))
    try:
        yield
    finally:
        state.restore()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, each module's own flag restored."""
    learning = [module for module in model.modules() if module.training]
    try:
        for module in learning:
            module.training = False
        yield
    finally:
        for module in learning:
            module.training = True


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Training mode, as the model's own `train` sets it, which may keep a part frozen or note the mode elsewhere.

    Afterwards each module's own flag is as before.
    """
    flags = [(module, module.training) for module in model.modules()]
    try:
        set_mode(model, True)
        yield
    finally:
        set_mode(model, flags[0][1])
        for module, flag in flags:
            module.training = flag


def arguments(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and named arguments that a model is called with."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if not isinstance(example, tuple | list):
        return (example,), {}
    return tuple(list(part) if isinstance(part, Images) else part for part in example), {}


def run(model: nn.Module, example: Example, cached: bool = False) -> Any:
    """Call the model on an example. A language model keeps no keys and values for a next call, unless `cached`."""
    args, kwargs = arguments(example)
    if _takes_use_cache(type(model).forward):
        kwargs.setdefault("use_cache", cached)
    return model(*args, **kwargs)


def caches(model: nn.Module) -> bool:
    """Whether a model keeps something for a next call unless it is told not to."""
    wanted = getattr(getattr(model, "config", None), "use_cache", False)
    return bool(wanted) and _takes_use_cache(type(model).forward)


@cache
def _takes_use_cache(forward: Callable[..., Any]) -> bool:
    return "use_cache" in inspect.signature(forward).parameters


def run_or_explain(model: nn.Module, example: Example) -> Any:
    """`run`, with the user's own error and the example's shapes in one message."""
    try:
        return run(model, example)
    except Exception as error:
        raise refusal(model, "the example", example, error) from error


def refusal(model: nn.Module, what: str, inputs: Example, error: Exception, fix: str = "") -> ForwardError:
    """The user's own error with the inputs' shapes, and a fix, such as where number formats do not match."""
    text = f"{type(model).__name__} does not run on {what} ({describe(inputs)}): {type(error).__name__}: {error}"
    return ForwardError(text, fix=fix or _conversion(model, inputs, str(error)))


def _conversion(model: nn.Module, inputs: Example, error: str) -> str:
    if "positional argument" in error:
        return "give what the model's forward takes, without targets"
    if "unexpected keyword argument" in error:
        return "name inputs as the model's forward does; or give pairs (inputs, targets)"
    planes = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if planes is not None and isinstance(inputs, Tensor) and inputs.ndim == 3:
        return "a batch of images, (samples, channels, height, width): x[None]"
    if planes is not None and isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[-1] == planes:
        return "channels come before height and width: x.permute(0, 3, 1, 2)"
    two_texts = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if two_texts and isinstance(inputs, Mapping) and not any(name.startswith("decoder_") for name in inputs):
        return "DataCollatorForSeq2Seq(tokenizer, model=model) adds what the decoder reads"
    if planes == 3 and isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[1] == 1:
        return "grey images for a network of colours: x.expand(-1, 3, -1, -1), normalised as in its training"
    if not _FORMATS.search(error):
        return ""
    if "'indices'" in error:
        return "numbers that an embedding looks up are whole: x.long()"
    weights = dtype_of(model)
    other = next((t.dtype for t in tensors_in(inputs) if t.dtype != weights), None)
    if weights not in _CASTS or other is None:
        return ""
    fix = f"the weights are {str(weights).removeprefix('torch.')}, so give x.{_CASTS[weights]}()"
    if other == torch.uint8 and planes is not None:  # the cast alone would run, on numbers that it never saw
        return f"{fix} / 255, normalised as in its training"
    return f"{fix}, or model.{_CASTS[other]}()" if other in _CASTS else fix


@contextmanager
def quiet() -> Iterator[None]:
    """No gradients, and all random number generators as they were before."""
    with drawing_again(), torch.no_grad():
        yield


@contextmanager
def seeded(seed: int, step: int, salt: int = 0) -> Iterator[None]:
    """Random numbers that depend on seed and step alone, so that a resumed run draws the same; the user's are kept."""
    key = int(np.random.SeedSequence([seed % 2**32, step, salt]).generate_state(1)[0])
    with drawing_again():
        torch.manual_seed(key)
        random.seed(key)
        np.random.seed(key)
        yield


def to_meta(example: Example) -> Example:
    """The example without numbers. Integer tensors keep theirs."""
    return map_tensors(lambda t: t.to("meta") if t.is_floating_point() else t, example)


def check_weights(model: nn.Module) -> None:
    """Refuse weights that are NaN or infinite, and buffers that are NaN, by name.

    Infinity in a buffer is ordinary: a mask of attention holds it, and so does a smallest value before any was seen.
    """
    model = unwrap(model)
    check_followed(model)
    empty = next((name for name, tensor in _floats(model) if tensor.is_meta), None)
    if empty is not None:
        raise UnsupportedModelError(
            f"`{empty}` of {type(model).__name__} is on the meta device and holds no numbers.",
            fix="model.to_empty(device='cpu'), then load its weights",
        )
    name = spoilt(model)
    if name is None:
        return
    values = "NaN or infinite" if name in _always_finite(model) else "NaN"
    raise NotFiniteError(
        f"`{name}` of {type(model).__name__} has {values} values, so no result would mean anything.",
        fix="load sound weights; look for a diverged training run or an overflow in half precision",
    )


def spoilt(model: nn.Module) -> str | None:
    """The first parameter or buffer of a model with numbers that it must not have; None if all are sound."""
    floats = _floats(model)
    # NaN and infinity survive in a sum, which is cheap and asks the device only once; of a complex one, in its size.
    totals = [_total(tensor).to(floats[0][1].device) for _, tensor in floats]
    if not totals or bool(torch.isfinite(torch.stack(totals)).all()):
        return None
    strict = _always_finite(model)
    for name, tensor in floats:
        if bool((~torch.isfinite(tensor) if name in strict else tensor.isnan()).any()):
            return name
    return None


def _total(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=torch.complex64).abs() if tensor.is_complex() else tensor.sum(dtype=torch.float32)


def _floats(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Tensors that can hold NaN."""
    named = named_tensors(model)
    return [(name, tensor.detach()) for name, tensor in named if tensor.is_floating_point() or tensor.is_complex()]


def _always_finite(model: nn.Module) -> set[str]:
    """The tensors in which infinity is as bad as NaN: parameters, and the buffers of norms with running statistics.

    An infinite mean makes every output of a batch norm infinite or NaN, and an infinite variance makes it a constant,
    whatever the network has learnt. Frozen batch norms hold their scale and shift as buffers, too.
    """
    norms = [(path, m) for path, m in named_modules(model) if "running_var" in m._buffers]
    return {name for name, _ in (*named_parameters(model), *tensors_of(norms))}
