"""Arithmetic between tensors: sums, products, comparisons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from secateur.nest import tensors_in
from secateur.ops.layers import Layers, is_zero, like
from secateur.ops.protocols import LabelVerbs, RelevanceVerbs, Zero, first, never
from secateur.ops.table import (
    Call,
    Decomposed,
    Query,
    Rule,
    Ruled,
    moves,
    passes,
    refused,
    register,
    register_named,
    stops,
    writes,
)


def operands_of(labels: LabelVerbs, *tensors: Tensor | None) -> list[tuple[Layers, list[int]]]:
    """Tensors as `LabelVerbs.merge` takes them. Dimensions along which one fits anything are broadcast.

    Whether the code makes it as large as what it meets, a trial removal finds out.
    """
    return [
        (labels.layers(t), [1 if d in free(labels, t) else n for d, n in enumerate(t.shape)])
        for t in tensors
        if t is not None
    ]


def free(labels: LabelVerbs, tensor: Tensor) -> frozenset[int]:
    """The dimensions along which a tensor is expanded, or fits whatever it meets."""
    return labels.fits(tensor) | {d for d, stride in enumerate(tensor.stride()) if not stride}


def freeze_zeros(labels: LabelVerbs, tensor: Any, deed: str) -> None:
    """What is 0 when it is masked must not become infinite: then removal is no masking."""
    for layer in labels.layers(tensor):
        if is_zero(layer):
            labels.freeze(layer, f"{deed}, and it is 0 when it is masked")


class Elementwise(Ruled):
    """Numbers meet position by position, with broadcasting: what they belong to must leave together.

    `zero`: whether the result is 0, given which of the operands are.
    """

    scalars = True

    def __init__(self, rule: Rule = moves, zero: Zero = never) -> None:
        super().__init__(rule)
        self._zero = zero

    def zero(self, call: Call) -> Zero:
        """The same for one call, whose plain numbers count as well."""
        return self._zero

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        for tensor in tensors_in(output):
            labels.merge(tensor, operands_of(labels, *call.tensors()), call.site, self.zero(call))
            labels.bind(call.tensors(), tensor)


class Choice(Elementwise):
    """One of two tensors, position by position. With the condition alone, `where` lists the places that are true."""

    def zero(self, call: Call) -> Zero:
        """Where both are."""
        chosen = [call["input"], call["other"]]
        tensors = sum(isinstance(item, Tensor) for item in chosen)
        if any(not isinstance(item, Tensor) and item != 0 for item in chosen):
            return never
        condition = next(i for i, tensor in enumerate(call.tensors()) if tensor is call["condition"])
        return lambda zeros: tensors > 0 and all(zero for i, zero in enumerate(zeros) if i != condition)

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        if call.get("other") is not None:
            super().channels(labels, call, output)
        else:
            labels.freeze_tensor(call["condition"], f"{call.site} looks up the places of what is true")

    def counts(self, call: Call) -> bool:
        return call.get("other") is None

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        """To whichever was chosen, constants included."""
        if call.get("other") is None:
            return relevance.stops(call)
        return torch.where(call["condition"], *(relevance.constant(call[name], call) for name in ("input", "other")))


class _Arithmetic(Elementwise):
    """Two tensors of one format make a third one, or overwrite the first."""

    def rehearse(self, call: Call) -> Any:
        """The shape, by arithmetic: torch takes a millisecond over it. What does not fit is left to torch."""
        tensors = call.tensors()
        x = tensors[0]
        if not x.is_meta or not x.is_floating_point() or len(tensors) > 2:
            return call.run()
        shape = tuple(x.shape)
        for y in tensors[1:]:
            if not y.is_meta or y.dtype != x.dtype or y.ndim != x.ndim:
                return call.run()
            if any(a != b and 1 not in (a, b) for a, b in zip(shape, y.shape, strict=True)):
                return call.run()
            shape = tuple([b if a == 1 else a for a, b in zip(shape, y.shape, strict=True)])
        if call.writes:
            return x if shape == tuple(x.shape) and call["input"] is x and all(x.stride()) else call.run()
        return like(x) if shape == tuple(x.shape) else like(x, shape)


class Sum(_Arithmetic):
    """Addition, or subtraction with `sign=-1`. `reflected`: the second argument comes first, as in `rsub`."""

    def __init__(self, sign: int = 1, reflected: bool = False) -> None:
        super().__init__(zero=all)
        self.sign, self.reflected = sign, reflected

    def zero(self, call: Call) -> Zero:
        """Where all terms are."""
        terms = call["input"], call.get("other")
        return all if all(isinstance(term, Tensor) or term == 0 for term in terms) else never

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        a, b = call["input"], call.get("other")
        first, second = (b, a) if self.reflected else (a, b)
        return relevance.adds(call, first, second, self.sign * float(call.get("alpha", 1)))


class Product(_Arithmetic):
    """Multiplication: gates, scales, masks. Relevance goes to the signal."""

    def __init__(self) -> None:
        super().__init__(zero=any)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        return relevance.gates(call, [call["input"], call.get("other")])


class Quotient(Elementwise):
    """Division and its remainders. `reflected`: the second argument is divided by the first. `rounds`: the result is
    rounded, or what rounding leaves.

    Relevance goes to what is divided, and to a divisor only if it alone carries any.
    """

    def __init__(self, reflected: bool = False, rounds: bool = False) -> None:
        super().__init__(zero=never if reflected else first)
        self.reflected, self.rounds = reflected, rounds

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        freeze_zeros(labels, call["input"] if self.reflected else call.get("other"), f"{call.site} divides by it")
        super().channels(labels, call, output)

    def relevance(self, relevance: RelevanceVerbs, call: Call) -> Any:
        a, b = call["input"], call.get("other")
        upper, lower = (b, a) if self.reflected else (a, b)
        if not isinstance(upper, Tensor) or not upper.requires_grad:
            return relevance.passes(call, lower)
        rounds = self.rounds or call.get("rounding_mode") is not None
        return relevance.passes(call, upper) if rounds else relevance.scales(call, upper)


class MaskedFill(Elementwise):
    """Writes one number where a mask is true."""

    def zero(self, call: Call) -> Zero:
        """Where the tensor is, if the number is 0."""
        value = call["value"]
        return first if not isinstance(value, Tensor) and value == 0 else never


class Fill(Ruled):
    """A tensor like another, filled with a constant; masks that overwrite. Its shape follows the other's."""

    scalars = True

    def __init__(self, rule: Rule, zero: bool = False) -> None:
        super().__init__(rule)
        self.zero = zero

    def channels(self, labels: LabelVerbs, call: Call, output: Any) -> None:
        source = call.tensors()[0]
        if source.shape == output.shape:
            labels.keep(source, output, self.zero)
            if self.zero:
                labels.set(output, [layer.abs() for layer in labels.layers(output)])


class Blank(Query):
    """A tensor with the same number everywhere: it fits whatever it meets."""

    def __init__(self, zero: bool = False) -> None:
        self.zero = zero


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


def _hypot(input: Tensor, other: Tensor) -> Tensor:
    """The length of the vector of two numbers."""
    return (input.square() + other.square()).sqrt()


register_named("input other alpha=1 out=None", "add __add__ __radd__", Sum(), in_place="add_ __iadd__")
register_named("input other alpha=1 out=None", "sub subtract __sub__", Sum(sign=-1), in_place="sub_ __isub__")
register_named("input other alpha=1", "rsub __rsub__", Sum(sign=-1, reflected=True))
register_named("input other", "mul multiply __mul__ __rmul__", Product(), in_place="mul_ __imul__")
register_named("input other rounding_mode=None", "div divide true_divide", Quotient(), in_place="div_")
register_named("input other", "__truediv__", Quotient(), in_place="__itruediv__")
register_named("input other", "floor_divide __floordiv__ remainder __mod__ fmod", Quotient(rounds=True))
register_named("input other", "", Quotient(rounds=True), in_place="__imod__ __ifloordiv__")
register_named("input other", "__rtruediv__ __rdiv__", Quotient(reflected=True))
register_named("input other", "__rfloordiv__ __rmod__", Quotient(reflected=True, rounds=True))
register_named("input end weight", "lerp", Elementwise(_interpolates, all), in_place="lerp_")
register_named("input tensor1 tensor2 value=1", "addcmul", Elementwise(_adds_product, all), in_place="addcmul_")
register_named("input tensor1 tensor2 value=1", "addcdiv", Elementwise(_adds_quotient), in_place="addcdiv_")
register_named("input other", "maximum minimum fmax fmin", Elementwise(writes, all))
register_named("input other", "hypot", Decomposed(_hypot))
register_named("input other|exponent", "atan2 arctan2 __rpow__ float_power ldexp", Elementwise(passes))
register_named("input other", "copysign", Elementwise(passes, first))
register_named("input other", "logaddexp logaddexp2 xlogy xlog1py", Elementwise(refused))
register("input|real other|imag", torch.complex, operation=Elementwise(refused, all))
register_named("input other", "eq ne gt lt ge le __eq__ __ne__ __gt__ __lt__ __ge__ __le__ __xor__", Elementwise(stops))
register_named("input other", "not_equal greater less greater_equal less_equal isclose", Elementwise(stops))
register_named("input other", "logical_and logical_or logical_xor bitwise_and bitwise_or", Elementwise(stops))
register_named("input other", "bitwise_xor __and__ __or__ __rand__ __ror__ __rxor__", Elementwise(stops))
register_named("input other", "", Elementwise(stops), in_place="__iand__ __ior__ __ixor__")
register_named("input other", "gcd lcm bitwise_left_shift bitwise_right_shift nextafter", Elementwise(stops))
register_named("input values", "heaviside", Elementwise(stops))
register_named("input", "isnan isinf isfinite", Elementwise(stops))
register_named("input mask value", "masked_fill", MaskedFill(writes), in_place="masked_fill_")
register_named("input *rest", "zeros_like", Fill(stops, zero=True), in_place="zero_")
register_named("input *rest", "ones_like empty_like full_like rand_like randn_like", Fill(stops))
register_named("input *rest", "fill bernoulli", Fill(stops), in_place="fill_ bernoulli_ normal_ uniform_")
register("input *rest", Tensor.exponential_, operation=Fill(stops), writes=True)
register("*size", torch.ones, torch.full, torch.empty, operation=Blank())
register("*size", torch.zeros, operation=Blank(zero=True))
register_named("input *size", "new_ones new_full new_empty", Blank())
register_named("input *size", "new_zeros", Blank(zero=True))
register("condition input other", torch.where, operation=Choice())
register("input condition other", Tensor.where, operation=Choice())
