"""Functions of one tensor, number by number."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.ops.layers import spread, varying
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Composite, Operation, register


class Activation(Operation):
    """A nonlinearity, number by number."""

    name = "activation"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Channels pass. (What a removed channel would have turned into is discarded with its consumers' weights.)"""
        labels.keep(call.tensors()[0], output)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Passes unchanged. Some are known to be ≥ 0, some act as gates when they multiply."""
        x = call.tensors()[0]
        name = call.function.__name__.strip("_")
        if name == "logical_not":
            return relevance.stops(call)
        nonneg = name in _NONNEG or (name in _CLAMPS and _least(call) >= 0)
        return relevance.passes(call, x, nonneg=nonneg, gate=name in _GATES)


class Identity(Operation):
    """Copies and casts. `scales` for dropout: in evaluation mode its numbers stay as they are."""

    name = "identity"

    def __init__(self, scales: bool = False) -> None:
        self.scales = scales

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Channels pass."""
        labels.keep(call.tensors()[0], output)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Passes unchanged, and so does everything known about the numbers."""
        return relevance.copies(call, call.tensors()[0], self.scales)


class PReLU(Operation):
    """Leaky ReLU with one slope per channel, or one for all."""

    name = "PReLU"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """The slope of a channel leaves with it."""
        x, weight = call["input"], call["weight"]
        axis = 1 if x.ndim > 1 else 0
        operands = [(labels.layers(x), list(x.shape))]
        if weight.numel() > 1:
            own = [size if d == axis else 1 for d, size in enumerate(x.shape)]
            held = labels.along(weight, 0)
            operands.append(([] if held is None else [spread(held, axis, own)], own))
        labels.merge(output, operands, call.site)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Passes unchanged."""
        return relevance.passes(call, call["input"])


class Softmax(Operation):
    """Normalises along one dimension: units along it cannot leave, units across it pass."""

    name = "softmax"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Freeze what varies along the dimension."""
        x = call["input"]
        dim = call["dim"]
        dim = (1 if x.ndim > 1 else 0) if dim is None else dim % x.ndim
        for layer in labels.layers(x):
            if varying(layer) == [dim]:
                labels.freeze(layer, f"{call.site} normalises over it")
            elif dim in varying(layer):
                labels.grid(layer, f"{call.site} normalises over it", rigid=[dim])
        labels.keep(x, output)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Passes; as a factor it is a gate."""
        if "log" in call.function.__name__:
            return relevance.passes(call, call["input"])
        return relevance.softmaxes(call, call["input"])


_NONNEG = {"relu", "relu6", "sigmoid", "hardsigmoid", "softplus", "exp", "abs", "square", "sqrt"}
_CLAMPS = {"hardtanh", "clamp", "clip", "clamp_min"}
_GATES = {"sigmoid", "hardsigmoid"}


def _least(call: Call) -> float:
    """The lower bound of a clamp, or -1 if there is none."""
    keywords = [call.kwargs[key] for key in ("min", "min_val") if key in call.kwargs]
    bound = keywords[0] if keywords else next(iter(call.args[1:]), None)
    return -1.0 if bound is None or isinstance(bound, Tensor) else float(bound)


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    """A gated linear unit, spelt out."""
    value, gate = input.chunk(2, dim)
    return value * gate.sigmoid()


def _names(owner: Any, names: str) -> list[Any]:
    return [getattr(owner, name, None) for name in names.split()]


_ACTIVATIONS = """relu relu_ relu6 gelu silu mish sigmoid tanh hardtanh hardtanh_ hardswish hardsigmoid elu elu_ selu
    selu_ celu celu_ leaky_relu leaky_relu_ rrelu softplus softsign logsigmoid tanhshrink softshrink hardshrink
    threshold threshold_"""
_MATH = """relu relu_ sigmoid sigmoid_ tanh tanh_ exp exp_ expm1 log log1p log2 sqrt sqrt_ rsqrt square square_ abs
    abs_ sign reciprocal clamp clamp_ clip clip_ clamp_min clamp_max round floor ceil erf sin cos neg neg_ negative
    nan_to_num selu celu rrelu pow pow_ __pow__ logical_not softplus"""
_COPIES = """clone contiguous detach detach_ float half double bfloat16 to type_as type int long bool cpu cuda
    requires_grad_ positive"""

register("input *rest", *_names(F, _ACTIVATIONS), operation=Activation())
register("input *rest", *_names(torch, _MATH), *_names(Tensor, _MATH), operation=Activation())
register(
    "input *rest",
    *_names(torch, _COPIES),
    *_names(Tensor, _COPIES),
    Tensor.data.__get__,  # type: ignore[attr-defined]
    operation=Identity(),
)
register(
    "input *rest",
    *_names(torch, "dropout dropout_ alpha_dropout feature_dropout"),
    *_names(F, "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"),
    operation=Identity(scales=True),
)
register("input weight", F.prelu, torch.prelu, Tensor.prelu, operation=PReLU())
register("input dim=None _stacklevel=3 dtype=None", F.softmax, F.log_softmax, F.softmin, operation=Softmax())
register(
    "input dim dtype=None",
    torch.softmax,
    torch.log_softmax,
    Tensor.softmax,
    Tensor.log_softmax,
    operation=Softmax(),
)
register("input dim=-1", F.glu, operation=Composite(_glu))
