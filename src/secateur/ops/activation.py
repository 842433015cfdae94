"""Functions of one tensor, number by number."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.ops.layers import spread, varying
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Decomposed, Operation, Ruled, named, passes, register, stops


class Activation(Operation):
    """A nonlinearity, number by number.

    `nonnegative`: its output is ≥ 0. `gate`: it lies between 0 and 1 and acts as a gate where it multiplies a signal.
    `rectifies`: it is the ReLU.
    """

    name = "activation"

    def __init__(self, nonnegative: bool = False, gate: bool = False, rectifies: bool = False) -> None:
        self.nonnegative = nonnegative
        self.gate = gate
        self.rectifies = rectifies

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Channels pass. (What a removed channel would have turned into is discarded with its consumers' weights.)"""
        labels.keep(call.tensors()[0], output)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Passes unchanged."""
        return relevance.passes(call, call.tensors()[0], nonneg=self.nonnegative, gate=self.gate)


class Clamp(Activation):
    """Limits numbers: its output is ≥ 0 if the lower bound is."""

    name = "clamp"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Passes unchanged."""
        keywords = [call.kwargs[key] for key in ("min", "min_val") if key in call.kwargs]
        bound = keywords[0] if keywords else next(iter(call.args[1:]), None)
        nonneg = bound is not None and not isinstance(bound, Tensor) and float(bound) >= 0
        return relevance.passes(call, call.tensors()[0], nonneg=nonneg)


class Negation(Ruled):
    """Logical not: a fact about numbers."""

    name = "negation"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Channels pass."""
        labels.keep(call.tensors()[0], output)


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


class PReLU(Ruled):
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


class Softmax(Operation):
    """Normalises along one dimension: units along it cannot leave, units across it pass."""

    name = "softmax"

    def __init__(self, log: bool = False) -> None:
        self.log = log

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
        """Passes. A softmax is a gate where it multiplies; its logarithm is not."""
        x = call["input"]
        return relevance.passes(call, x) if self.log else relevance.softmaxes(call, x)


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    """A gated linear unit, spelt out."""
    value, gate = input.chunk(2, dim)
    return value * gate.sigmoid()


for _operation, _plain, _in_place in (
    (Activation(nonnegative=True, rectifies=True), "relu", "relu_"),
    (Activation(nonnegative=True, gate=True), "sigmoid hardsigmoid", "sigmoid_"),
    (Activation(nonnegative=True), "relu6 softplus exp abs square sqrt", "exp_ abs_ square_ sqrt_"),
    (Clamp(), "hardtanh clamp clip clamp_min", "hardtanh_ clamp_ clip_"),
    (Activation(), "gelu silu mish tanh hardswish elu selu celu leaky_relu rrelu threshold", "tanh_ elu_ selu_ celu_"),
    (Activation(), "softsign logsigmoid tanhshrink softshrink hardshrink", "leaky_relu_ threshold_"),
    (Activation(), "expm1 log log1p log2 rsqrt sign reciprocal clamp_max round floor ceil erf sin cos", "neg_ pow_"),
    (Activation(), "neg negative nan_to_num pow __pow__", ""),
    (Negation(stops), "logical_not", ""),
    (Identity(), "clone contiguous detach float half double bfloat16 to type_as type int long bool", "detach_"),
    (Identity(), "cpu cuda positive", "requires_grad_"),
    (Identity(scales=True), "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout", "dropout_"),
    (Identity(scales=True), "feature_dropout", ""),
):
    register("input *rest", *named(_plain, F, torch, Tensor), operation=_operation)
    register("input *rest", *named(_in_place, F, torch, Tensor), operation=_operation, writes=True)
register("input *rest", Tensor.data.__get__, operation=Identity())  # type: ignore[attr-defined]
register("input weight", F.prelu, torch.prelu, Tensor.prelu, operation=PReLU(passes))
register("input dim=None _stacklevel=3 dtype=None", F.softmax, F.softmin, operation=Softmax())
register("input dim=None _stacklevel=3 dtype=None", F.log_softmax, operation=Softmax(log=True))
register("input dim dtype=None", *named("softmax"), operation=Softmax())
register("input dim dtype=None", *named("log_softmax"), operation=Softmax(log=True))
register("input dim=-1", F.glu, operation=Decomposed(_glu))
