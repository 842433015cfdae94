"""The step of a student as functions of tensors.

One compiled program serves every layer and every student whose tensors have the same shapes, so that a compiler has a
dozen small programs to make instead of one large one for each student.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.league_kernels import conv

TEMPERATURE, MOMENTUM, INPUTS = 4.0, 0.9, 8  # INPUTS: images are padded to so many channels, for the matrix units
_ALIGNED = 64  # elements; matrix units read whole lines of memory
_PROGRAMS = 64  # that may be made of one function; the compiler's own limit is 8

#: Weight, scale, shift, running mean and running variance of a convolution and its batch norm.
Layer = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _normal(x: Tensor, layer: Layer, stride: int = 1) -> Tensor:
    weight, scale, shift, mean, variance = layer
    return F.batch_norm(conv(x, weight, None, stride), mean, variance, scale, shift, True, 0.1)


def _shortcut(x: Tensor, stride: int, more: int) -> Tensor:
    return F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, more // 2, more // 2)) if more else x


def stem(x: Tensor, layer: Layer) -> Tensor:
    return F.relu(_normal(x, layer))


def block(x: Tensor, first: Layer, second: Layer, stride: int, more: int) -> Tensor:
    return F.relu(_normal(F.relu(_normal(x, first, stride)), second) + _shortcut(x, stride, more))


def head(
    x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, answer: Tensor | None, share: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of `sc.recover`, and what is summed up: the loss, and how many answers are right of how many."""
    logits = F.linear(x.mean((2, 3)), weight, bias).float()
    loss = F.cross_entropy(logits, labels)
    if answer is not None:
        own, known = (F.log_softmax(t.float() / TEMPERATURE, 1) for t in (logits, answer))
        apart = F.kl_div(own, known, reduction="batchmean", log_target=True)
        loss = share * TEMPERATURE**2 * apart + (1 - share) * loss
    right = (logits.argmax(1) == labels).sum()
    return loss, torch.stack([loss.detach(), right.float(), torch.ones_like(share) * len(labels)])


def answer_stem(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(conv(x, weight, bias))


def answer_block(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, stride: int, more: int) -> Tensor:
    out = conv(F.relu(conv(x, w1, b1, stride)), w2, b2)
    return F.relu(out + _shortcut(x, stride, more))


class Functions(NamedTuple):
    stem: Callable[..., Any] = stem
    block: Callable[..., Any] = block
    head: Callable[..., Any] = head
    answer_stem: Callable[..., Any] = answer_stem
    answer_block: Callable[..., Any] = answer_block


PLAIN = Functions()


@cache
def compiled(backend: str = "inductor") -> Functions:
    import torch._dynamo

    for name in ("recompile_limit", "cache_size_limit"):  # its name in newer and in older versions
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, _PROGRAMS)
    return Functions(*(torch.compile(function, backend=backend, dynamic=False) for function in PLAIN))


class Flat:
    """Tensors as parts of one tensor, so that an operation on all of them is one operation on `all`."""

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None, filled: bool = True) -> None:
        self._places, end = [], 0
        for tensor in tensors:
            self._places.append((tensor.shape, tensor.stride(), end))
            end += -(-tensor.numel() // _ALIGNED) * _ALIGNED
        self.all = torch.zeros(end, dtype=dtype or tensors[0].dtype, device=tensors[0].device)
        #: The parts have the order in memory that the tensors had.
        self.parts = [torch.as_strided(self.all, *place) for place in self._places]
        if filled:
            with torch.no_grad():
                for part, tensor in zip(self.parts, tensors, strict=True):
                    part.copy_(tensor)

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors into the parts, in few operations where their order in memory is the same."""
        pairs = list(zip(self.parts, tensors, strict=True))
        for dtype in {tensor.dtype for tensor in tensors}:
            alike = [(p, t) for p, t in pairs if t.dtype == dtype and t.stride() == p.stride()]
            if alike:
                torch._foreach_copy_([p for p, _ in alike], [t for _, t in alike])
        for part, tensor in pairs:
            if tensor.stride() != part.stride():
                part.copy_(tensor)


class Teacher:
    """The unpruned network. In half precision, the same kind of functions compute it, if it has no batch norms."""

    def __init__(self, net: nn.Module, half: bool) -> None:
        self.net: Any = net
        self.dtype = torch.bfloat16 if half else torch.float32
        self._functional = half and not any(isinstance(m, nn.BatchNorm2d) for m in net.modules())
        if not self._functional:
            return
        order = torch.channels_last
        self._tensors = {
            name: (wider(tensor) if name == "conv1.weight" else tensor).detach().to(self.dtype)
            for name, tensor in net.named_parameters()
        }
        for name, tensor in self._tensors.items():
            self._tensors[name] = tensor.contiguous(memory_format=order) if tensor.ndim == 4 else tensor.clone()

    def __call__(self, images: Tensor, x: Tensor, functions: Functions, both: bool = False) -> Tensor:
        """The answers to `images`, `prepared` as `x`; with `both`, their mean with the answers to mirrored ones."""
        if both:
            mirrored = images.flip(-1), x.flip(-1).contiguous(memory_format=torch.channels_last)
            return (self(images, x, functions) + self(*mirrored, functions)) / 2
        if not self._functional:
            answer: Tensor = self.net(images)
            return answer
        known = self._tensors
        out = functions.answer_stem(x, known["conv1.weight"], known["conv1.bias"])
        for path, module in self.net.named_modules():
            if hasattr(module, "stride") and hasattr(module, "more"):
                names = ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias")
                own = (known[f"{path}.{name}"] for name in names)
                out = functions.answer_block(out, *own, module.stride, module.more)
        return F.linear(out.mean((2, 3)), known["linear.weight"], known["linear.bias"])


def wider(tensor: Tensor) -> Tensor:
    """A first convolution that reads further channels, and ignores them."""
    return F.pad(tensor, (0, 0, 0, 0, 0, max(0, INPUTS - tensor.shape[1])))


def prepared(images: Tensor, half: bool, channels: int) -> Tensor:
    """A batch as the first convolution wants it. Further channels are 0."""
    if not half:
        return F.pad(images, (0, 0, 0, 0, 0, channels - images.shape[1])) if channels > images.shape[1] else images
    images = images.to(torch.bfloat16)
    return F.pad(images, (0, 0, 0, 0, 0, channels - images.shape[1])).contiguous(memory_format=torch.channels_last)
