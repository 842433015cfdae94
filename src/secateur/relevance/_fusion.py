"""An accelerator: a layer computed together with the batch norm and the ReLU that followed it in the batch before.

Without it, a batch norm computes its output from that of the layer, and the folded weights are used only on the way
back. With it, from the second batch on, a convolution with the folded weights gives the output of the batch norm, and
the ReLU overwrites it at once. The same holds for a sum and its ReLU. What the model gets to see in between is then
ahead of its time. If anything reads it, the batch is run again without fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secateur.ops.table import Call, Site
from secateur.relevance._kernels import one_kernel, permitted
from secateur.relevance.accelerators import Attempt
from secateur.relevance.activations import Activations
from secateur.relevance.linear_maps import ConvMap, Geometry, LinearMap
from secateur.relevance.weights import LinearCall, Weights
from secateur.running.tensor_facts import TensorFacts

#: Statistics, weight and bias of a batch norm, and its epsilon.
BatchNorm = tuple[tuple[Tensor | None, ...], float]
#: Makes a layer part of the graph: from what computes its output, the call, and what makes its linear map.
Step = Callable[[Callable[[], Tensor], LinearCall, Callable[[Tensor], LinearMap]], Tensor]

#: Numbers precise enough to compute with folded weights.
_FULL = (torch.float32, torch.float64)


@dataclass(slots=True, eq=False)
class Followed:
    """What followed a convolution or a sum in the batch before."""

    norm: BatchNorm | None = None  # the batch norm that read it
    rectified: bool = False  # a ReLU overwrote it, or the output of its batch norm, at once
    reread: bool = False  # something other than this batch norm read it


@dataclass(slots=True, eq=False)
class Made:
    """A tensor that a convolution, its batch norm or a sum made in this batch."""

    followed: Followed
    raw: bool = False  # a batch norm may still read it
    normed: LinearMap | None = None  # it already is the output of the batch norm, by this map
    ahead: bool = False  # it already is the output of the ReLU


class Habits:
    """What fusion remembers between batches. If it is not `allowed`, it remembers nothing, and nothing is fused."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.followed: dict[Site, Followed] = {}
        #: Whether fused layers gave the model's own output; None if this was not checked yet.
        self.trusted: bool | None = None

    def trust(self, plain: Tensor, fused: Tensor) -> bool:
        """Whether the fused output is that of the model itself. If not, nothing is fused from now on.

        Some calls bypass `__torch_function__`, and such a call may have read what was computed ahead of its time.
        """
        self.trusted = bool((plain - fused).norm() <= 1e-2 * plain.norm())
        return self.trusted


class Fusion:
    """The fused layers of one batch."""

    def __init__(self, habits: Habits, weights: Weights, activations: Activations, attempt: Attempt) -> None:
        self._followed, self._weights, self._activations = habits.followed, weights, activations
        self._attempt, self._allowed = attempt, habits.allowed
        self._active = attempt.expected and habits.trusted is not False
        self._made: TensorFacts[Made] = TensorFacts()
        #: How many layers and sums were fused.
        self.count = 0

    def layer(self, record: LinearCall, step: Step) -> Tensor | None:
        """The output of a convolution as its batch norm or ReLU will make it; None if they are not fused."""
        use, x = record.use, record.x
        followed = self._followed.get(use.site)
        if not self._active or followed is None or not isinstance(use.build, Geometry) or use.build.border:
            return None
        if followed.reread if followed.norm is not None else not followed.rectified:
            return None
        if x.dtype not in _FULL or not isinstance(use.source, nn.Parameter):
            return None
        self.count += 1
        with torch.no_grad():
            layer = self._weights.prepared(record, *(followed.norm or ()))
        assert isinstance(layer, ConvMap)
        if followed.norm is None:
            output = step(lambda: _forward(layer, x, True), record, lambda a: layer)
            self._made[output] = Made(followed, ahead=True)
        else:
            with torch.no_grad():
                output = _forward(layer, x, followed.rectified).requires_grad_(True)
            self._made[output] = Made(followed, normed=layer)
        return output

    def norm(self, x: Tensor, record: LinearCall, norm: BatchNorm, step: Step) -> Tensor | None:
        """The output of a batch norm that was computed with its layer; None if it was not."""
        made = self._made.get(x)
        if made is None:
            return None
        if made.ahead:
            self._attempt.deviates()
        layer, expected = made.normed, made.followed.norm
        if layer is None:
            return None
        same = expected is not None and all(a is b for a, b in zip(expected[0], norm[0], strict=True))
        if expected is None or not same or expected[1] != norm[1]:
            self._attempt.deviates()
        return step(x.detach, record, lambda a: layer)

    def normed(self, record: LinearCall, output: Tensor, norm: BatchNorm, fused: bool) -> None:
        """A batch norm that is folded into a layer made `output`."""
        followed = self._followed.get(record.use.site)
        if followed is not None:
            followed.reread = followed.reread or record.normed
            followed.norm, record.normed = norm, True
            self._made[output] = Made(followed, ahead=fused and followed.rectified)

    def adds(self, site: Site, a: Tensor, b: Tensor, sign: float) -> Callable[[], Tensor] | None:
        """What computes a sum with its ReLU; None if they are not fused."""
        followed = self._followed.get(site)
        if not self._active or followed is None or not followed.rectified or sign != 1:
            return None
        if a.dtype != b.dtype or a.dtype not in _FULL or a.shape != b.shape:
            return None
        self.count += 1
        return lambda: rectified(a, b)

    def made(self, site: Site, output: Tensor, raw: bool = False, ahead: bool = False) -> None:
        """A convolution or a sum made `output`. If it is `ahead`, the ReLU is part of it already."""
        if self._allowed:
            self._made[output] = Made(self._followed.setdefault(site, Followed()), raw=raw, ahead=ahead)

    def is_pending(self, value: Tensor) -> bool:
        """Whether a tensor is the output of a layer that was computed with its batch norm."""
        made = self._made.get(value)
        return made is not None and made.normed is not None

    def reads(self, value: Tensor) -> bool:
        """Something other than a batch norm reads a tensor. Returns whether it is ahead of a ReLU."""
        made = self._made.get(value)
        if made is None:
            return False
        if made.normed is not None:
            self._attempt.deviates()
        made.followed.reread = made.followed.reread or made.raw
        return made.ahead

    def overwritten(self, call: Call, x: Tensor) -> None:
        """A call overwrites `x`, which was made just before."""
        made = self._made.get(x)
        if made is not None:
            made.followed.rectified = made.followed.rectified or (call.rectifies and call.writes)
            self._made.forget(x)

    def overtaken(self, call: Call, x: Tensor) -> Tensor:
        """The ReLU that has already been computed. No other call may see its result."""
        if not (call.rectifies and call.writes) or call.tensors()[0] is not x:
            self._attempt.deviates()
        self._made.forget(x)
        self._activations.overwritten(x)
        self._activations.note_nonneg(x)
        return x


def _forward(layer: ConvMap, a: Tensor, rectify: bool) -> Tensor:
    """A convolution with its bias, and a ReLU if asked for."""
    if rectify and layer.bias is not None and a.is_cuda:  # torch would add the bias in a kernel of its own
        made = _by_cudnn(layer, a)
        return rectified(layer(a, layer.weight), layer.bias) if made is None else made
    bias = None if layer.bias is None else layer.bias.view(-1)
    z = torch.convolution(a, layer.weight, bias, *layer.geometry.options)
    return z.relu_() if rectify else z


#: For kinds of convolutions whether cuDNN computes them with bias and ReLU as torch does in two steps.
_agrees: dict[Hashable, bool] = {}


def _by_cudnn(layer: ConvMap, a: Tensor) -> Tensor | None:
    """A convolution with bias and ReLU as one kernel, which takes no longer than the convolution alone.

    None where there is no such kernel, or where it gives other numbers. Whether TF32 is used is torch's setting.
    """
    form, bias = layer.geometry, layer.bias
    fits = a.dtype == torch.float32 and a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last)
    if bias is None or not fits or form.groups != 1 or form.transposed or not permitted() or not len(a):
        return None
    key = form, layer.weight.shape, a.shape, a.device
    if _agrees.get(key) is False or not torch.backends.cudnn.is_acceptable(a):  # type: ignore[no-untyped-call]
        return None

    def at_once(x: Tensor) -> Tensor:
        return torch.cudnn_convolution_relu(
            x, layer.weight, bias.view(-1), form.stride, form.padding, form.dilation, form.groups
        )

    try:
        if key not in _agrees:
            if torch.cuda.is_current_stream_capturing():  # to compare is to wait
                return None
            mine, plain = at_once(a[:1]), rectified(layer(a[:1], layer.weight), bias)
            _agrees[key] = bool((mine - plain).norm() <= 1e-3 * plain.norm())
        return at_once(a) if _agrees[key] else None
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # cuDNN has no kernel for this
        _agrees[key] = False
        return None


@one_kernel("template <typename T> T rectified(T z, T b) { T s = z + b; return s < T(0) ? T(0) : s; }")
def rectified(z: Tensor, bias: Tensor) -> Tensor:
    """max(z + bias, 0)."""
    return torch.add(z, bias).relu_()
