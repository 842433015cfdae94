"""Arithmetic between tensors: sums, products, choices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Operation, register


class Elementwise(Operation):
    """Numbers meet position by position, with broadcasting: what they belong to must leave together."""

    name = "elementwise"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Merge the labels of all operands."""
        operands = [(labels.layers(t), list(t.shape)) for t in call.tensors()]
        for tensor in tensors_in(output):
            labels.merge(tensor, operands, call.site)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """As the data move (masks)."""
        return relevance.moves(call)


class Sum(Elementwise):
    """Addition and subtraction."""

    name = "sum"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Shared by the rule of the composite; constants take none."""
        name, a, b = call.function.__name__.strip("_"), call["input"], call.get("other")
        if name == "lerp":
            with relevance.again():
                return a * (1 - call["weight"]) + call["end"] * call["weight"]
        alpha = float(call.get("alpha", 1))
        if name == "rsub":
            return relevance.adds(call, b, a, -alpha)
        return relevance.adds(call, a, b, -alpha if name in ("sub", "isub", "subtract") else alpha)


class Product(Elementwise):
    """Multiplication and division: gates, scales, masks."""

    name = "product"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """To the signal; gates, scales and divisors take none."""
        name, a, b = call.function.__name__.strip("_"), call["input"], call.get("other")
        if name.startswith("addc"):
            with relevance.again():
                factor = call["tensor1"] * call["tensor2"] if "mul" in name else call["tensor1"] / call["tensor2"]
                return a + call["value"] * factor
        if name in ("mul", "rmul", "imul", "multiply"):
            return relevance.gates(call, [a, b])
        upper, lower = (b, a) if name in ("rtruediv", "rdiv") else (a, b)
        return relevance.passes(call, upper if isinstance(upper, Tensor) and upper.requires_grad else lower)


class Choice(Elementwise):
    """Maximum, minimum, where, comparison: one of the operands, or a fact about them."""

    name = "choice"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """To whichever operand was chosen; comparisons carry none."""
        if call.function.__name__ == "where":
            chosen = [
                relevance.constant(t, call) if isinstance(t, Tensor) else t for t in (call["input"], call["other"])
            ]
            return torch.where(call["condition"], *chosen)
        if call.function.__name__ in ("maximum", "minimum"):
            return relevance.moves(call)
        if call.function.__name__ in ("__rpow__", "float_power", "atan2"):
            return relevance.passes(call, call["input"])
        return relevance.stops(call)


class Fill(Operation):
    """A tensor like another, filled with a constant; masks that overwrite."""

    name = "fill"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """The shape follows the tensor it is modelled on, and so do the labels."""
        source = call.tensors()[0]
        if tuple(source.shape) == tuple(output.shape):
            labels.keep(source, output)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """A constant carries none."""
        return relevance.stops(call)


def _both(names: str) -> list[Any]:
    return [getattr(owner, name, None) for owner in (torch, Tensor) for name in names.split()]


register("input other alpha=1 out=None", *_both("add add_ sub sub_ subtract rsub"), operation=Sum())
register(
    "input other", *_both("__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__"), operation=Sum()
)  # fmt: skip
register(
    "input other rounding_mode=None",
    *_both("mul mul_ multiply div div_ divide true_divide __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __rdiv__"),
    *_both("__itruediv__ floor_divide __floordiv__ remainder __mod__ fmod"),
    operation=Product(),
)
register("input tensor1 tensor2 value=1", *_both("addcmul addcmul_ addcdiv addcdiv_"), operation=Product())
register("input end weight", *_both("lerp lerp_"), operation=Sum())
register(
    "input other",
    *_both(
        "maximum minimum max_other eq ne gt lt ge le __eq__ __ne__ __gt__ __lt__ __ge__ __le__ logical_and logical_or"
    ),
    *_both("__and__ __or__ __xor__ bitwise_and bitwise_or atan2 __rpow__ float_power isnan isinf isfinite"),
    operation=Choice(),
)
register("condition input other", torch.where, operation=Choice())
register("input condition other", Tensor.where, operation=Choice())
register("input mask value", *_both("masked_fill masked_fill_"), operation=Elementwise())
register(
    "input *rest",
    *_both("zeros_like ones_like empty_like full_like rand_like randn_like zero_ fill_ fill bernoulli normal_"),
    *[getattr(torch.Tensor, name, None) for name in ("uniform_", "bernoulli_", "exponential_")],
    operation=Fill(),
)
