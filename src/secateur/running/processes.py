"""Many processes: sums are added up over all of them, so that every process makes the same plan.

Before each message, every process says whether it failed. So an error in one of them is raised in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secateur.errors import ProcessError
from secateur.running.devices import precise
from secateur.running.tensor_files import digest_of

Item = TypeVar("Item")
_inside: ContextVar[bool] = ContextVar("inside", default=False)
_END: Any = object()


def active() -> bool:
    """Whether this is one of several processes, as under `torchrun` after `init_process_group`."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def share() -> tuple[int, int]:
    """This process's number and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if active() else (0, 1)


def is_first() -> bool:
    """Whether this process writes files and shows progress."""
    return share()[0] == 0


@contextmanager
def together(wanted: bool = True) -> Iterator[None]:
    """Work that every process does. If it fails in one, it fails in all, and none waits for another in vain."""
    if not wanted or not active() or _inside.get():
        yield
        return
    outer = _inside.set(True)
    try:
        yield
        agree()
    except ProcessError:  # all know
        raise
    except Exception as error:
        with suppress(Exception):  # the connection may be what failed
            agree(error)
        raise
    finally:
        _inside.reset(outer)


def agree(error: Exception | None = None, flag: bool = False) -> bool:
    """Wait for every process; whether any of them has a flag. If some failed, the others raise an error."""
    if not active():
        return flag
    facts = torch.tensor([float(error is not None), float(flag)], device=_channel(None))
    dist.all_reduce(facts)
    failed, flags = facts.tolist()
    if failed:
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, None if error is None else f"{type(error).__name__}: {error}")
        number, text = next((number, text) for number, text in enumerate(texts) if text is not None)
        if error is None:
            raise ProcessError(f"process {number} failed: {text}")
    return bool(flags)


def in_step(items: Iterable[Item]) -> Iterator[Item]:
    """Items for as long as every process has another one."""
    source = iter(items)
    while not agree(flag=(item := next(source, _END)) is _END):
        yield item


def gathered(value: Item) -> list[Item]:
    """The values of all processes, in the order of their numbers."""
    if not active():
        return [value]
    agree()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def check_same(model: nn.Module) -> None:
    """Refuse tensors that are not the same in every process, by name."""
    if not active():
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    first, *others = gathered({name: digest_of([(name, tensor)]) for name, tensor in named})
    for number, other in enumerate(others, 1):
        wrong = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise ProcessError(
                f"`{wrong[0]}`{more} of {type(model).__name__} differs between process 0 and process {number}.",
                where=wrong[0],
                fix="give every process the same weights; buffers differ after training with DistributedDataParallel: "
                "torch.distributed.broadcast(buffer, 0) for each of model.buffers()",
            )


def sum_over_processes(
    parts: Sequence[Tensor | None], sizes: Sequence[int], samples: int, device: torch.device | None
) -> tuple[list[Tensor | None], int]:
    """Vectors (None where nothing was seen) and a count, summed over all processes. One message for everything.

    A process without data takes part with zeros. The first process's result is sent to all, so that no rounding can
    make their plans differ.
    """
    if not active():
        return list(parts), samples
    agree()
    device = _channel(device)
    wide = precise(device)
    sent = [
        torch.zeros(size, dtype=wide, device=device) if values is None else values.to(device, wide)
        for values, size in zip(parts, sizes, strict=True)
    ]
    seen = torch.tensor([float(values is not None) for values in parts] + [float(samples)], dtype=wide)
    flat = torch.cat([*sent, seen.to(device)])
    dist.all_reduce(flat)
    dist.broadcast(flat, 0)
    *split, counts = torch.split(flat, [*sizes, len(seen)])
    known = counts.tolist()
    return [values if count else None for values, count in zip(split, known, strict=False)], round(known[-1])


def same_everywhere(value: Any) -> Any:
    """The first process's value, on all."""
    if not active():
        return value
    agree()
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def wait() -> None:
    """Until every process is here."""
    agree()


def synchronise(model: nn.Module, more: Sequence[Tensor] = ()) -> None:
    """Give every process the first one's parameters and buffers, and `more` tensors."""
    if not active():
        return
    agree()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers(), *more]:
            held: Tensor = tensor.data.contiguous()
            dist.broadcast(held, 0)
            tensor.data.copy_(held)


def _channel(device: torch.device | None) -> torch.device:
    """Where messages must lie: nccl speaks only of CUDA tensors."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device is None or device.type == "mps" else device
