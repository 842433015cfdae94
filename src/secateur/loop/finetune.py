"""Fine-tuning between steps: SGD as in the paper, in mixed precision on CUDA, with DistributedDataParallel if there are
several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.arguments import check_callable, check_count, check_flag, check_number
from secateur.errors import DataError
from secateur.nest import select_samples
from secateur.running.batches import Data, as_batch, as_data, is_pair, size_of
from secateur.running.devices import device_of, to_device
from secateur.running.logits import logits_of
from secateur.running.processes import active, agree, in_step, share, synchronise, together
from secateur.running.sandbox import run
from secateur.running.targets import Reader

#: `f(model, step)` trains the model in place.
Tuner = Callable[[nn.Module, int], Any]


@dataclass(frozen=True)
class FineTune:
    """Train the model in place after each removal: `Schedule(finetune=FineTune(data))`.

    `data` is a pair (X, y), shuffled in every epoch, or an iterable of batches, such as a DataLoader. The defaults are
    the paper's. Frozen parameters stay frozen. With `mixed`, CUDA models compute in half precision. In several
    processes, an epoch ends when one of them has no batch left.

    >>> net = nn.Linear(3, 2)
    >>> FineTune((torch.rand(8, 3), torch.arange(8) % 2), epochs=2)(net, step=1)
    """

    data: Data
    epochs: int = 10
    lr: float = 1e-3
    momentum: float = 0.9
    batch_size: int = 20
    weight_decay: float = 0.0
    loss: Callable[[Tensor, Any], Tensor] | None = None
    mixed: bool = True

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs)
        check_count("batch_size", self.batch_size)
        for name in ("lr", "momentum", "weight_decay"):
            check_number(name, getattr(self, name), least=0)
        check_callable("loss", self.loss, "a function f(output, targets)")
        check_flag("mixed", self.mixed)

    @together()
    def __call__(self, model: nn.Module, step: int) -> None:
        """Train. Afterwards each module's training flag is what it was."""
        flags = [(module, module.training) for module in model.modules()]
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise DataError("every parameter is frozen (requires_grad=False): there is nothing to fine-tune.")
        optimizer = torch.optim.SGD(parameters, self.lr, self.momentum, weight_decay=self.weight_decay)
        device = device_of(model)
        cuda = device is not None and device.type == "cuda"
        mixed = self.mixed and cuda
        half = torch.bfloat16 if mixed and torch.cuda.is_bf16_supported() else torch.float16
        scaler = torch.amp.GradScaler("cuda", enabled=mixed and half is torch.float16)
        net: nn.Module = model.train()
        reader = Reader(model)
        if active():
            net = nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if cuda and device else None)
        try:
            with torch.enable_grad():
                for epoch in range(self.epochs):
                    seen = 0
                    for inputs, targets in in_step(self._epoch()):
                        inputs, targets = to_device(inputs, device), to_device(targets, device)
                        optimizer.zero_grad(set_to_none=True)
                        with torch.autocast("cuda", half, enabled=mixed):
                            output = logits_of(run(net, inputs))
                            if self.loss is not None:
                                loss = self.loss(output, targets)
                            else:  # checking asks the device for numbers, so it is done in the first epoch only
                                loss = reader.read(inputs, targets, output.float()).loss(check=epoch == 0)
                        agree()  # nobody waits for the gradients of a process that has none
                        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                        scaler.step(optimizer)
                        scaler.update()
                        seen += 1
                    if not seen:
                        raise DataError("there is no batch to fine-tune on.")
        finally:
            for parameter in model.parameters():
                parameter.grad = None
            for module, flag in flags:
                module.training = flag
        synchronise(model)  # batch norm statistics are each process's own

    def _epoch(self) -> Iterator[tuple[Any, Any]]:
        data = as_data(self.data)
        if not is_pair(data):
            if not isinstance(data, Iterable) or isinstance(data, Iterator):
                raise DataError("fine-tuning repeats the data: give a pair (X, y), a list or a DataLoader.")
            yield from map(as_batch, data)
            return
        inputs, targets = data
        count, (rank, world) = size_of(inputs), share()
        order = torch.randperm(count)  # every process draws the same, then takes its part of each batch
        for begin in range(0, count, self.batch_size):
            chunk = order[begin : begin + self.batch_size]
            if len(chunk) < 2 * world and begin:
                continue  # batch norm cannot train on a single sample
            mine = chunk[rank::world]
            yield select_samples(inputs, mine), select_samples(targets, mine)
