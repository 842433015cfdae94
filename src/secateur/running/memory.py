"""How much memory a process may use: what is free now, or what the user allows."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from secateur.errors import Argument, SecateurError
from secateur.nest import select_samples, tensors_in
from secateur.ops.table import Call
from secateur.running.devices import device_of
from secateur.running.observer import Observer
from secateur.running.sandbox import quiet, run

#: A number of bytes, or a text such as "2 GiB". None: what is free.
Memory = int | float | str | None

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_TEXT = re.compile(r"([0-9.]+)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
#: More than this, weights included, is not used on a CPU unless the user allows it: work does not get faster by it.
_ENOUGH = 3 * 2**29
#: Of what is free, this share is used: others need memory too.
_SHARE = 0.6
#: About what the cache of a CPU holds, and less than what malloc gives back to the system at once.
CACHE = 30 * 2**20
#: Where nothing tells how much there is.
_UNKNOWN = 4 * 2**30
_LEAST = 16 * 2**20
#: Bytes of all activations for a byte of an image; its square for a token.
_WIDER = 1000
#: So many tensors as large as the largest are alive at once in a forward pass.
_ALIVE = 4
#: Of the most that is held while models pass a batch in turn several times, the first turn holds this share or more.
_FIRST_TURN = 0.75
#: A part of the memory: what the positive and negative parts of all weights may take, for relevance to keep them.
_PARTS = 4
Made = TypeVar("Made")
_given: ContextVar[int | None] = ContextVar("memory", default=None)


def parse(memory: Memory) -> int | None:
    """The bytes that a user means.

    >>> parse("1.5 GiB"), parse("800MB"), parse(2**30)
    (1610612736, 800000000, 1073741824)
    """
    if memory is None:
        return None
    found = _TEXT.fullmatch(memory.strip()) if isinstance(memory, str) else None
    value: Any = memory
    if found is not None:
        number, unit, binary = found.groups()
        with suppress(ValueError):
            value = float(number) * (1024 if binary else 1000) ** _UNITS[unit.lower()]
    if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value < 2**63:
        raise SecateurError(
            "{memory} is no amount of memory, or less than 16 MiB.",
            fix="bytes, or a text such as '2 GiB'",
            memory=Argument("memory", memory),
        )
    return int(value)


@contextmanager
def limited(memory: Memory) -> Iterator[None]:
    """A context in which work takes at most so much memory; None changes nothing."""
    token = _given.set(_given.get() if memory is None else parse(memory))
    try:
        yield
    finally:
        _given.reset(token)


def allowed(device: torch.device | None, taken: int = 0, memory: int | None = None) -> int:
    """The bytes that work on a device may take: what the user said, or a share of what is free, less what is `taken`
    by copies of the weights."""
    memory = _given.get() if memory is None else memory
    if memory is None:
        memory = int(_SHARE * free_on(device))
        if device is None or device.type != "cuda":
            memory = min(memory, _ENOUGH)
    return max(_LEAST, memory // 4, memory - taken)


def free_on(device: torch.device | None) -> int:
    """The bytes that are free on a device for this process."""
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds and does not use is free as well.
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    known = [found for found in (_of_the_machine(), _of_the_container(), _of_the_process()) if found is not None]
    return max(0, min(known, default=_UNKNOWN))


def resident() -> int:
    """The bytes that this process holds in memory now; 0 where nothing tells."""
    with suppress(OSError, AttributeError, ValueError, IndexError):
        return os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return 0


def peak() -> int:
    """The most that `resident` was so far. (`getrusage` would give the parent's peak, if that is higher.)"""
    return 1024 * _numbers("/proc/self/status").get("VmHWM", 0)


def release() -> None:
    """Give memory that nothing uses back to the system. Other libraries do not share what torch has freed."""
    gc.collect()
    trim()


def trim() -> None:
    """`release` without a search for what nothing uses."""
    with suppress(OSError, AttributeError):  # other systems than Linux
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def trim_beyond(held: int, part: int = 4) -> int:
    """`trim`, if the process holds more than `held` and a part of what work may take: on a CPU, passes leave holes
    in the heap, and come upon others of them each time. Returns what was held after the last time."""
    grown = resident() - held
    if grown > _LEAST // part and grown > allowed(None) // part:  # the second takes longer to ask
        trim()
        return resident()
    return held


def _of_the_machine() -> int | None:
    """What the kernel could hand out without swapping."""
    found = _numbers("/proc/meminfo").get("MemAvailable")
    if found is not None:
        return 1024 * found
    with suppress(AttributeError, OSError, ValueError):  # not every system tells
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return None


def _of_the_container(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int | None:
    """What is left below the limits of the control groups that the process is in (versions 1 and 2)."""
    left: list[int] = []
    with suppress(OSError, ValueError):
        for line in Path(own).read_text(encoding="ascii").splitlines():
            _, kinds, group = line.split(":", 2)
            if kinds not in ("", "memory") and "memory" not in kinds.split(","):
                continue
            old = kinds != ""
            top = Path(root, "memory") if old else Path(root)
            limit, used, cache = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                if old
                else ("memory.max", "memory.current", "inactive_file")
            )
            below = Path(group.lstrip("/"))
            # A container may see its own group as the root. Groups further up have limits too.
            for folder in [top / below, *(top / up for up in below.parents)]:
                with suppress(OSError, ValueError):
                    most = int((folder / limit).read_text(encoding="ascii"))  # "max" is no number
                    taken = int((folder / used).read_text(encoding="ascii"))
                    left.append(most - taken + _numbers(folder / "memory.stat").get(cache, 0))
    return min(left, default=None)


def _of_the_process() -> int | None:
    """What is left below `ulimit -v` and `ulimit -d`."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    status, left = _numbers("/proc/self/status"), []
    for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most = resource.getrlimit(kind)[0]
        if most != resource.RLIM_INFINITY and used in status:
            left.append(most - 1024 * status[used])
    return min(left, default=None)


def _numbers(path: str | Path) -> dict[str, int]:
    """The first number of each line of a file, by the line's first word."""
    with suppress(OSError):
        words = (line.replace(":", " ").split() for line in Path(path).read_text(encoding="ascii").splitlines())
        return {found[0]: int(found[1]) for found in words if len(found) > 1 and found[1].isdigit()}
    return {}


class _Footprint(Observer):
    """Adds up what a forward pass makes, and notes the largest output, in bytes."""

    total = largest = 0

    def observe(self, call: Call) -> Any:
        output = call.run()
        if not call.writes:
            made = sum(t.numel() * t.element_size() for t in tensors_in(output))
            self.total, self.largest = self.total + made, max(self.largest, made)
        return output

    def concerns(self, value: Any) -> bool:
        return False


def footprint(model: nn.Module, inputs: Any) -> tuple[int, int]:
    """The bytes that a forward pass makes for one sample, all together and the largest alone. The model is a copy."""
    with quiet(), _Footprint(model) as seen:
        run(model, select_samples(inputs, slice(1)))
    return max(seen.total, 1), max(seen.largest, 1)


def _made_of(inputs: Any) -> int:
    """The bytes that networks make of such inputs at most, by experience."""
    return sum(t.numel() * (4 * _WIDER if t.is_floating_point() else _WIDER**2) for t in tensors_in(inputs))


def at_once(model: nn.Module, inputs: Any, wanted: int) -> tuple[int, bool]:
    """The wanted number of samples, or as many as a forward pass needs memory for at once, and whether it is sure that
    these fit. The model is a copy."""
    room, one = allowed(device_of(model)), select_samples(inputs, slice(1))
    if wanted * _made_of(one) <= room:
        return wanted, True
    try:
        _, largest = footprint(model, one)
    except Exception:  # it will be raised again, and explained, where the model is run
        return wanted, True
    return min(wanted, max(1, room // (_ALIVE * largest))), False


class _Beyond(Exception):
    """A forward pass took too much."""


class _Ceiling(TorchFunctionMode):
    """Ends a forward pass once the process holds more than so many bytes."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self._most = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if resident() > self._most:
            raise _Beyond
        return made


def fits(models: Sequence[nn.Module], inputs: Any) -> bool:
    """Whether models that pass inputs in turn stay within the memory, by a trial. The models are copies.

    What a pass needs at once does not tell: tensors of different sizes leave holes in the heap of a CPU, where a pass
    then takes up to six times as much (DenseNet). A GPU says itself when it has too little.
    """
    device, fitting = device_of(models[0]), True
    if device is not None and device.type != "cpu":
        return True
    trim()
    with suppress(Exception):  # another one will be raised again, and explained, where the model is run
        try:
            with quiet(), _Ceiling(resident() + _FIRST_TURN * allowed(device)):
                for model in models:
                    run(model, inputs)
        except _Beyond:
            fitting = False
    trim()
    return fitting


def spares_parts(model: nn.Module) -> bool:
    """Whether the positive and negative parts of a model's weights are too large to be kept for the next batch."""
    device, size = device_of(model), 2 * _weight_of(model)
    if size <= _LEAST // _PARTS or (device is not None and device.type != "cpu"):  # what is free takes longer to ask
        return False
    return size > allowed(device) // _PARTS


def _weight_of(model: nn.Module) -> int:
    """The bytes of all parameters."""
    return sum(t.numel() * t.element_size() for t in model.parameters())


def together(model: nn.Module, inputs: Any, backward: bool = False) -> int:
    """How many samples a model takes at once: as many as fit into memory, with what a backward pass of relevance needs
    if asked for.

    A forward pass on a CPU is fastest if the largest activation stays in the cache.
    """
    device = device_of(model)
    # Relevance folds batch norms into weights, and keeps these.
    taken = (1 if spares_parts(model) else 3) * _weight_of(model) if backward else 0
    room, cached = allowed(device, taken), not backward and (device is None or device.type == "cpu")
    made = _made_of(inputs)  # small batches need no look
    if made <= room and not (cached and made > 32 * CACHE):
        return 2**20
    try:
        total, largest = footprint(model, inputs)
    except Exception:  # it will be raised again, and explained, where the model is run
        return 2**20
    if backward:
        return max(1, room // (2 * total))
    fitting = max(1, room // (_ALIVE * largest))
    return min(fitting, max(8, CACHE // largest)) if cached else fitting


def in_smaller_parts(work: Callable[[int], Made], size: int, least: int = 1) -> Made:
    """`work(size)`; if a GPU has too little memory for that, with half of it, and so on down to `least`."""
    while True:
        try:
            return work(size)
        except torch.OutOfMemoryError as error:
            if size <= least:
                raise SecateurError(
                    f"there is too little memory on the GPU even for the smallest part: {str(error).splitlines()[0]}",
                    fix="a smaller model, or the CPU: model.cpu()",
                ) from error
        size = max(least, size // 2)
        gc.collect()  # the traceback held tensors
        torch.cuda.empty_cache()
