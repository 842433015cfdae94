"""Arithmetic between tensors: sums, products, comparisons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.layers import Layers
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs
from secateur.ops.table import Call, Ruled, moves, passes, register, register_named, stops


def operands_of(labels: LabelVerbs, *tensors: Tensor | None) -> list[tuple[Layers, list[int]]]:
    """Tensors as `LabelVerbs.merge` takes them."""
    return [(labels.layers(tensor), list(tensor.shape)) for tensor in tensors if tensor is not None]


class Elementwise(Ruled):
    """Numbers meet position by position, with broadcasting: what they belong to must leave together."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        for tensor in tensors_in(output):
            labels.merge(tensor, operands_of(labels, *call.tensors()), call.site)


class Sum(Elementwise):
    """Addition, or subtraction with `sign=-1`. `reflected`: the second argument comes first, as in `rsub`."""

    def __init__(self, sign: int = 1, reflected: bool = False) -> None:
        super().__init__()
        self.sign, self.reflected = sign, reflected

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        a, b = call["input"], call.get("other")
        first, second = (b, a) if self.reflected else (a, b)
        return relevance.adds(call, first, second, self.sign * float(call.get("alpha", 1)))


class Product(Elementwise):
    """Multiplication: gates, scales, masks. Relevance goes to the signal."""

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        return relevance.gates(call, [call["input"], call.get("other")])


class Quotient(Elementwise):
    """Division and its remainders. `reflected`: the second argument is divided by the first.

    Relevance goes to what is divided, and to a divisor only if it alone carries any.
    """

    def __init__(self, reflected: bool = False) -> None:
        super().__init__()
        self.reflected = reflected

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        a, b = call["input"], call.get("other")
        upper, lower = (b, a) if self.reflected else (a, b)
        return relevance.passes(call, upper if isinstance(upper, Tensor) and upper.requires_grad else lower)


class Fill(Ruled):
    """A tensor like another, filled with a constant; masks that overwrite. Its shape follows the other's."""

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        source = call.tensors()[0]
        if source.shape == output.shape:
            labels.keep(source, output)


def _interpolates(relevance: RelevanceVerbs, call: Call) -> Any:
    """A weighted mean of two tensors, as the products and the sum that it is."""
    with relevance.again():
        return call["input"] * (1 - call["weight"]) + call["end"] * call["weight"]


def _adds_product(relevance: RelevanceVerbs, call: Call) -> Any:
    """A tensor plus a scaled product of two others."""
    with relevance.again():
        return call["input"] + call["value"] * (call["tensor1"] * call["tensor2"])


def _adds_quotient(relevance: RelevanceVerbs, call: Call) -> Any:
    """A tensor plus a scaled quotient of two others."""
    with relevance.again():
        return call["input"] + call["value"] * (call["tensor1"] / call["tensor2"])


def _chooses(relevance: RelevanceVerbs, call: Call) -> Any:
    """One of two tensors, position by position: to whichever was chosen, constants included."""
    operands = (call["input"], call["other"])
    chosen = [relevance.constant(t, call) if isinstance(t, Tensor) else t for t in operands]
    return torch.where(call["condition"], *chosen)


for _signature, _operation, _plain, _in_place in (
    ("input other alpha=1 out=None", Sum(), "add __add__ __radd__", "add_ __iadd__"),
    ("input other alpha=1 out=None", Sum(sign=-1), "sub subtract __sub__", "sub_ __isub__"),
    ("input other alpha=1", Sum(sign=-1, reflected=True), "rsub __rsub__", ""),
    ("input other", Product(), "mul multiply __mul__ __rmul__", "mul_ __imul__"),
    ("input other rounding_mode=None", Quotient(), "div divide true_divide __truediv__", "div_ __itruediv__"),
    ("input other", Quotient(), "floor_divide __floordiv__ remainder __mod__ fmod", ""),
    ("input other", Quotient(reflected=True), "__rtruediv__ __rdiv__", ""),
    ("input end weight", Elementwise(_interpolates), "lerp", "lerp_"),
    ("input tensor1 tensor2 value=1", Elementwise(_adds_product), "addcmul", "addcmul_"),
    ("input tensor1 tensor2 value=1", Elementwise(_adds_quotient), "addcdiv", "addcdiv_"),
    ("input other", Elementwise(moves), "maximum minimum", ""),
    ("input other", Elementwise(passes), "atan2 __rpow__ float_power", ""),
    ("input other", Elementwise(stops), "eq ne gt lt ge le __eq__ __ne__ __gt__ __lt__ __ge__ __le__", ""),
    ("input other", Elementwise(stops), "logical_and logical_or __and__ __or__ __xor__ bitwise_and bitwise_or", ""),
    ("input", Elementwise(stops), "isnan isinf isfinite", ""),
    ("input mask value", Elementwise(moves), "masked_fill", "masked_fill_"),
    ("input *rest", Fill(stops), "zeros_like ones_like empty_like full_like rand_like randn_like fill bernoulli", ""),
    ("input *rest", Fill(stops), "", "zero_ fill_ normal_ uniform_ bernoulli_ exponential_"),
):
    register_named(_signature, _plain, _operation, _in_place)
register("condition input other", torch.where, operation=Elementwise(_chooses))
register("input condition other", Tensor.where, operation=Elementwise(_chooses))
