"""Functions of one tensor, number by number."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.ops.elementwise import freeze_zeros, operands_of
from secateur.ops.layers import like, varying
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs, never
from secateur.ops.table import (
    Call,
    Decomposed,
    Operation,
    Ruled,
    refused,
    register,
    register_named,
    signal,
    stops,
    transforms,
)

_AT_ZERO: dict[Any, float] = {}
_SETTING = frozenset({bool, int, float})


class Unary(Ruled):
    """A function of one tensor that leaves every number in its place. What a removed channel would have turned into
    is discarded with its consumers' weights."""

    scalars = True

    def zero(self, call: Call) -> bool:
        """Whether it makes 0 of 0. What depends on other tensors too is not trusted."""
        return len(call.tensors()) == 1 and self._at_zero(call) == 0

    def _at_zero(self, call: Call) -> float:
        """What it makes of 0: it is tried, once for each function with these settings."""
        settings = (*call.args[1:], *call.kwargs.values())
        plain = bool(call.args) and isinstance(call.args[0], Tensor) and all(type(s) in _SETTING for s in settings)
        key = (call.function, len(call.args), tuple(call.kwargs), settings)
        if plain and key in _AT_ZERO:
            return _AT_ZERO[key]
        try:
            made = float(call.on(call.tensors()[0])(torch.zeros(1)))
        except (LookupError, RuntimeError, TypeError, ValueError):  # it takes no such tensor
            made = 1.0
        if plain:
            _AT_ZERO[key] = made
        return made

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, zero = call.tensors()[0], self.zero(call)
        if not zero and len(call.tensors()) == 1 and not math.isfinite(self._at_zero(call)):
            freeze_zeros(labels, x, f"{call.site} is not finite at 0")
        labels.keep(x, output, zero)


class Activation(Unary):
    """A nonlinearity, number by number: relevance passes unchanged.

    `nonnegative`: its output is ≥ 0. `gate`: it lies between 0 and 1 and acts as a gate where it multiplies a signal.
    `limits`: it limits numbers and does nothing else; `rectifies`: it is the ReLU.
    """

    def __init__(
        self, nonnegative: bool = False, gate: bool = False, limits: bool = False, rectifies: bool = False
    ) -> None:
        super().__init__()
        self.nonnegative, self.gate, self.limits, self.rectifies = nonnegative, gate, limits, rectifies

    def rehearse(self, call: Call) -> Any:
        """The input's shape: torch decomposes some of these functions, which takes milliseconds."""
        x = call.tensors()[0]
        if not x.is_meta or not x.is_floating_point() or len(call.tensors()) > 1:
            return call.run()
        return x if call.writes else like(x)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        return relevance.passes(call, signal(call), nonneg=self.nonnegative, gate=self.gate)


class Clamp(Activation):
    """Limits numbers: its output is ≥ 0 if the lower bound is. A bound that is a tensor meets them one by one."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        tensors = all(item is None or isinstance(item, Tensor) for item in (*call.args, *call.kwargs.values()))
        zero = all if tensors or self.zero(call) else never
        labels.merge(output, operands_of(labels, *call.tensors()), call.site, zero)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        if any(bound.requires_grad for bound in call.tensors()[1:]):
            return relevance.moves(call)
        keywords = [call.kwargs[key] for key in ("min", "min_val") if key in call.kwargs]
        bound = keywords[0] if keywords else next(iter(call.args[1:]), None)
        nonneg = bound is not None and not isinstance(bound, Tensor) and float(bound) >= 0
        return relevance.passes(call, call.tensors()[0], nonneg=nonneg)


class Identity(Unary):
    """Copies and casts: everything known about the numbers stays true. `scales` for dropout, which scales them unless
    it is in evaluation mode."""

    def __init__(self, scales: bool = False) -> None:
        super().__init__()
        self.scales = scales

    def zero(self, call: Call) -> bool:
        return True

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        return relevance.copies(call, call.tensors()[0], self.scales)


class Softmax(Operation):
    """Normalises along one dimension: units along it cannot leave, units across it pass."""

    def __init__(self, log: bool = False) -> None:
        self.log = log

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        x, dim = call["input"], _axis(call)
        for layer in labels.layers(x):
            if varying(layer) == [dim]:
                labels.share(layer, output, call)
            elif dim in varying(layer):
                labels.grid(layer, f"{call.site} normalises over it", rigid=[dim])
        labels.keep(x, output, zero=False)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        # A softmax is a gate where it multiplies; its logarithm is not.
        x = call["input"]
        return relevance.passes(call, x) if self.log else relevance.softmaxes(call, x, _axis(call))


def _axis(call: Call) -> int:
    """The dimension of a softmax. Left out, it is the first of one or three dimensions, else the second."""
    count, dim = call["input"].ndim, call["dim"]
    return int(count not in (0, 1, 3)) if dim is None else dim % max(count, 1)


def _scales(relevance: RelevanceVerbs, call: Call) -> Any:
    """Unchanged: the numbers are only scaled."""
    return relevance.scales(call, call.tensors()[0])


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    """A gated linear unit, spelt out."""
    value, gate = input.chunk(2, dim)
    return value * gate.sigmoid()


def _softmin(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
    """A softmax of the opposite."""
    return F.softmax(-input, dim, _stacklevel, dtype)


for _operation, _names in (
    (Activation(nonnegative=True, limits=True, rectifies=True), "relu"),
    (Activation(nonnegative=True, limits=True), "relu6"),
    (Activation(nonnegative=True, gate=True), "sigmoid hardsigmoid expit ndtr"),
    (Activation(nonnegative=True), "softplus exp exp2 abs absolute square sqrt cosh erfc"),
    (Clamp(limits=True), "hardtanh clamp clip clamp_min"),
    (Activation(), "gelu silu mish tanh hardswish elu selu celu leaky_relu rrelu threshold softsign logsigmoid"),
    (Activation(), "tanhshrink softshrink hardshrink expm1 log log1p log2 log10 rsqrt sign sgn reciprocal clamp_max"),
    (Activation(), "round floor ceil trunc fix frac erf erfinv logit sin cos tan sinh sinc asin acos atan asinh acosh"),
    (Activation(), "atanh arcsin arccos arctan arcsinh arccosh arctanh nan_to_num pow __pow__ digamma lgamma"),
    (Activation(), "log_ndtr entr gammaln psi"),
    (Unary(_scales), "neg negative __neg__ deg2rad rad2deg"),
    (Unary(transforms), "conj conj_physical"),
    (Unary(refused), "angle"),
    (Unary(stops), "logical_not bitwise_not __invert__ signbit isposinf isneginf isreal"),
    (Identity(), "clone contiguous detach float half double bfloat16 to type_as type int long bool short char byte"),
    (Identity(), "cpu cuda xpu positive pin_memory resolve_conj resolve_neg"),
    (Identity(scales=True), "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"),
    (Identity(scales=True), "feature_dropout"),
):
    register_named("input *rest", _names, _operation)
register("input", Tensor.requires_grad_, operation=Identity(), writes=True)
register("input other", Tensor.__ipow__, operation=Activation(), writes=True)
register("input *rest", Tensor.data.__get__, operation=Identity())  # type: ignore[attr-defined]
register("input dim=None _stacklevel=3 dtype=None", F.softmax, operation=Softmax())
register("input dim=None _stacklevel=3 dtype=None", F.softmin, operation=Decomposed(_softmin))
register("input dim=None _stacklevel=3 dtype=None", F.log_softmax, operation=Softmax(log=True))
register("input dim dtype=None", torch.softmax, Tensor.softmax, torch.special.softmax, operation=Softmax())
register(
    "input dim dtype=None",
    torch.log_softmax,
    Tensor.log_softmax,
    torch.special.log_softmax,
    operation=Softmax(log=True),
)
register("input dim=-1", F.glu, operation=Decomposed(_glu))
