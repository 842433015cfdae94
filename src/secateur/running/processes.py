"""Many processes: sums are added up over all of them, so that every process makes the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secateur.running.devices import precise


def active() -> bool:
    """Whether this is one of several processes, as under `torchrun` after `init_process_group`."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def share() -> tuple[int, int]:
    """This process's number and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if active() else (0, 1)


def is_first() -> bool:
    """Whether this process writes files and shows progress."""
    return share()[0] == 0


def sum_over_processes(
    parts: Sequence[Tensor | None], sizes: Sequence[int], samples: int, device: torch.device | None
) -> tuple[list[Tensor | None], int]:
    """Vectors (None where nothing was seen) and a count, summed over all processes. One message for everything.

    A process without data takes part with zeros. The first process's result is sent to all, so that no rounding can
    make their plans differ.
    """
    if not active():
        return list(parts), samples
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
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def wait() -> None:
    """Until every process is here."""
    if active():
        dist.barrier()


def synchronise(model: nn.Module) -> None:
    """Give every process the first one's parameters and buffers."""
    if not active():
        return
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            held: Tensor = tensor.data.contiguous()
            dist.broadcast(held, 0)
            tensor.data.copy_(held)


def _channel(device: torch.device | None) -> torch.device:
    """Where messages must lie: nccl speaks only of CUDA tensors."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device is None or device.type == "mps" else device
