"""Arithmetic between tensors: sums, products, comparisons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Ruled, named, passes, register, stops


class Elementwise(Ruled):
    """Numbers meet position by position, with broadcasting: what they belong to must leave together."""

    name = "elementwise"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """Merge the labels of all operands."""
        operands = [(labels.layers(t), list(t.shape)) for t in call.tensors()]
        for tensor in tensors_in(output):
            labels.merge(tensor, operands, call.site)


class Sum(Elementwise):
    """Addition, or subtraction with `sign=-1`. `reflected`: the second argument comes first, as in `rsub`."""

    name = "sum"

    def __init__(self, sign: int = 1, reflected: bool = False) -> None:
        super().__init__()
        self.sign = sign
        self.reflected = reflected

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """Shared by the rule of the composite; constants take none."""
        a, b = call["input"], call.get("other")
        first, second = (b, a) if self.reflected else (a, b)
        return relevance.adds(call, first, second, self.sign * float(call.get("alpha", 1)))


class Lerp(Elementwise):
    """A weighted mean of two tensors."""

    name = "lerp"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """As the products and the sum that it is."""
        with relevance.again():
            return call["input"] * (1 - call["weight"]) + call["end"] * call["weight"]


class Product(Elementwise):
    """Multiplication: gates, scales, masks."""

    name = "product"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """To the signal; gates and scales take none."""
        return relevance.gates(call, [call["input"], call.get("other")])


class Quotient(Elementwise):
    """Division and its remainders. `reflected`: the second argument is divided by the first."""

    name = "quotient"

    def __init__(self, reflected: bool = False) -> None:
        super().__init__()
        self.reflected = reflected

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """To what is divided; a divisor takes none unless it alone carries any."""
        a, b = call["input"], call.get("other")
        upper, lower = (b, a) if self.reflected else (a, b)
        return relevance.passes(call, upper if isinstance(upper, Tensor) and upper.requires_grad else lower)


class AddedProduct(Elementwise):
    """`addcmul`, or `addcdiv` with `divides`: a tensor plus a scaled product or quotient of two others."""

    name = "added product"

    def __init__(self, divides: bool = False) -> None:
        super().__init__()
        self.divides = divides

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """As the product and the sum that it is."""
        first, second = call["tensor1"], call["tensor2"]
        with relevance.again():
            return call["input"] + call["value"] * (first / second if self.divides else first * second)


class Where(Elementwise):
    """One of two tensors, position by position."""

    name = "where"

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """To whichever operand was chosen, constants included."""
        operands = (call["input"], call["other"])
        chosen = [relevance.constant(t, call) if isinstance(t, Tensor) else t for t in operands]
        return torch.where(call["condition"], *chosen)


class Fill(Ruled):
    """A tensor like another, filled with a constant; masks that overwrite."""

    name = "fill"

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        """The shape follows the tensor it is modelled on, and so do the labels."""
        source = call.tensors()[0]
        if tuple(source.shape) == tuple(output.shape):
            labels.keep(source, output)


register("input other alpha=1 out=None", *named("add __add__ __radd__"), operation=Sum())
register("input other alpha=1 out=None", *named("add_ __iadd__"), operation=Sum(), writes=True)
register("input other alpha=1 out=None", *named("sub subtract __sub__"), operation=Sum(sign=-1))
register("input other alpha=1 out=None", *named("sub_ __isub__"), operation=Sum(sign=-1), writes=True)
register("input other alpha=1", *named("rsub __rsub__"), operation=Sum(sign=-1, reflected=True))
register("input end weight", *named("lerp"), operation=Lerp())
register("input end weight", *named("lerp_"), operation=Lerp(), writes=True)
register("input other", *named("mul multiply __mul__ __rmul__"), operation=Product())
register("input other", *named("mul_ __imul__"), operation=Product(), writes=True)
register(
    "input other rounding_mode=None",
    *named("div divide true_divide __truediv__ floor_divide __floordiv__ remainder __mod__ fmod"),
    operation=Quotient(),
)
register("input other rounding_mode=None", *named("div_ __itruediv__"), operation=Quotient(), writes=True)
register("input other", *named("__rtruediv__ __rdiv__"), operation=Quotient(reflected=True))
register("input tensor1 tensor2 value=1", *named("addcmul"), operation=AddedProduct())
register("input tensor1 tensor2 value=1", *named("addcmul_"), operation=AddedProduct(), writes=True)
register("input tensor1 tensor2 value=1", *named("addcdiv"), operation=AddedProduct(divides=True))
register("input tensor1 tensor2 value=1", *named("addcdiv_"), operation=AddedProduct(divides=True), writes=True)
register("input other", *named("maximum minimum"), operation=Elementwise())
register("input other", *named("atan2 __rpow__ float_power"), operation=Elementwise(passes))
register(
    "input other",
    *named("eq ne gt lt ge le __eq__ __ne__ __gt__ __lt__ __ge__ __le__ logical_and logical_or isnan isinf isfinite"),
    *named("__and__ __or__ __xor__ bitwise_and bitwise_or"),
    operation=Elementwise(stops),
)
register("condition input other", torch.where, operation=Where())
register("input condition other", Tensor.where, operation=Where())
register("input mask value", *named("masked_fill"), operation=Elementwise())
register("input mask value", *named("masked_fill_"), operation=Elementwise(), writes=True)
register(
    "input *rest",
    *named("zeros_like ones_like empty_like full_like rand_like randn_like fill bernoulli"),
    operation=Fill(stops),
)
register(
    "input *rest", *named("zero_ fill_ normal_ uniform_ bernoulli_ exponential_"), operation=Fill(stops), writes=True
)
