"""Corrections of a layer, by name: a constant per output, a scale and a constant, new weights. One class for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from secateur.errors import RepairError
from secateur.repair.moments import Moments, Regression
from secateur.repair.rows import wide


@dataclass(frozen=True)
class Correction:
    """One way to correct a layer: what `repair=` can name.

    A correction of your own is a subclass with a `name` and a `fit`; `register_correction` makes it known. Its fields
    are its settings, each with a default. Corrections are equal if class and fields are.
    """

    name: ClassVar[str]
    #: Whether `repair="best"` tries it, and whether only if the others leave much to be desired.
    in_best: ClassVar[bool] = False
    fallback: ClassVar[bool] = False
    #: Whether `fit` needs sums over what the layer reads: a `Regression` instead of `Moments`.
    needs_inputs: ClassVar[bool] = False
    #: Corrections that are tried before it on each layer. Leaving the layer as it is always is.
    simpler: ClassVar[tuple[Correction, ...]] = ()

    def fit(self, moments: Moments, shifts: bool) -> Change:
        """The change of one layer. `shifts` says whether a constant can be added to the layer's outputs."""
        raise NotImplementedError

    def candidates(self, moments: Moments, cautious: bool) -> Sequence[Correction]:
        """What to try on a layer, e.g. other strengths, in order: the search goes to neighbours while they are better.

        `cautious`: no samples are held out, so that nothing shows overfitting.
        """
        return (self,)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Change:
    """What a correction does to a layer: multiply outputs by `scale`, add x @ `weight`, add `shift`.

    `scale` and `shift` are (groups, outputs), `weight` is (groups, features, outputs).
    """

    correction: Correction
    shift: Tensor | None = None
    scale: Tensor | None = None
    weight: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether it leaves the layer as it is."""
        return self.shift is None and self.scale is None and self.weight is None

    def adds(self, rows: Tensor) -> Tensor:
        """What new weights and a shift add to the output, for rows (n, groups, features) of what the layer reads."""
        assert self.weight is not None
        rows = wide(rows)
        made = (rows.transpose(0, 1) @ self.weight.to(rows.dtype)).transpose(0, 1)
        return made if self.shift is None else made + self.shift.to(rows.dtype)

    def error(self, held: Moments) -> Tensor:
        """Mean square that the output still lacks on other rows, per output (groups, outputs)."""
        square, mean = held.ee, held.e
        if self.scale is not None:  # e' = e + y - scale · y - shift
            less = 1 - self.scale
            square = square + 2 * less * held.ey + less.square() * held.yy
            mean = mean + less * held.y
        if self.weight is not None:
            assert isinstance(held, Regression)
            square = square - held.gain(self.weight)
            mean = mean - (held.x[:, None, :] @ self.weight)[:, 0]
        if self.shift is not None:
            square = square - 2 * self.shift * mean + held.rows * self.shift.square()
        return (square / held.rows).clamp_min(0)


class Nothing(Correction):
    """Leaves the layer as it is."""

    name = "none"

    def fit(self, moments: Moments, shifts: bool) -> Change:
        return Change(self)


NOTHING = Nothing()
# Names that `repair=` gives another meaning.
_RESERVED = ("best", "none", "auto")
_KNOWN: dict[str, type[Correction]] = {}
Kind = TypeVar("Kind", bound=type[Correction])


def register_correction(kind: Kind) -> Kind:
    """Let `repair=name` find a correction of yours. A decorator of its class."""
    if kind.name in _RESERVED:
        raise RepairError(f"a correction cannot be called {kind.name!r}.", fix=f"a name besides {', '.join(_RESERVED)}")
    _KNOWN[kind.name] = kind
    return kind


def known_corrections() -> list[str]:
    """Every name that `repair=` takes besides "best", "none" and "auto"."""
    return list(_KNOWN)


def corrections_named(method: str) -> list[Correction]:
    """The corrections that a method tries on the whole model: the one of that name, or several for "best"."""
    if method == "best":
        return [kind() for kind in _KNOWN.values() if kind.in_best]
    if method not in _KNOWN:
        raise RepairError(f"repair {method!r} is not known.", fix=f"use one of {', '.join(['best', *_KNOWN])}")
    return [_KNOWN[method]()]


@register_correction
class Mean(Correction):
    """Adds the constant that makes the means right."""

    name, in_best, fallback = "mean", True, True

    def fit(self, moments: Moments, shifts: bool) -> Change:
        return Change(self, shift=moments.e / moments.rows) if shifts else Change(NOTHING)


@register_correction
class Norm(Correction):
    """Scales each output and adds a constant, so that mean and variance are those of the original's t = y + e."""

    name, in_best, fallback = "norm", True, True
    simpler = (Mean(),)

    def fit(self, moments: Moments, shifts: bool) -> Change:
        """Scales stay between 1/4 and 4."""
        n, y = moments.rows, moments.y
        mean_y, mean_t = y / n, (y + moments.e) / n
        var_y = (moments.yy / n - mean_y.square()).clamp_min(0)
        var_t = (moments.size - mean_t.square()).clamp_min(0)
        # A channel that hardly varies on the data gives no evidence for a scale.
        sure = (var_y > 1e-8 * var_y.mean().clamp_min(1e-30)) & (var_t > 0)
        scale = torch.where(sure, (var_t / var_y.clamp_min(1e-30)).sqrt(), 1.0).clamp(0.25, 4.0)
        return Change(self, shift=mean_t - scale * mean_y if shifts else None, scale=scale)


# Of the mean square of an output: what a layer lacks by rounding alone, in single precision.
_ROUNDING = 1e-12
#: Strengths of a ridge that are tried, relative to the mean variance of what the layer reads.
STRENGTHS = (100.0, 10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


@register_correction
@dataclass(frozen=True)
class Ridge(Correction):
    """New weights by a ridge regression on their change, and the constant that goes with them."""

    name, in_best = "ridge", True
    needs_inputs = True
    simpler = (Mean(),)
    strength: float = 1.0

    def fit(self, moments: Moments, shifts: bool) -> Change:
        """See `Regression.solve`. Nothing if there is no solution."""
        if not isinstance(moments, Regression) or (weight := moments.solve(self.strength, shifts)) is None:
            return Change(NOTHING)
        shift = (moments.e - (moments.x[:, None, :] @ weight)[:, 0]) / moments.rows if shifts else None
        return Change(self, shift=shift, weight=weight)

    def candidates(self, moments: Moments, cautious: bool) -> Sequence[Correction]:
        """All strengths; only strong ones if nothing is held out; `Norm` where inputs are not known."""
        if not isinstance(moments, Regression):
            return (Norm(),)
        return [Ridge(strength) for strength in STRENGTHS if strength >= 1 or not cautious]

    def __str__(self) -> str:
        return f"{self.name} {self.strength:g}"


def best_change(
    method: Correction, fit: Moments, held: Moments, shifts: bool, weight: Tensor | float = 1.0,
    near: Correction | None = None,
) -> tuple[Change, float, float]:  # fmt: skip
    """The change with the least error on held-out rows; that error, and the error without a change.

    Outputs count by `weight`. The search over the method's candidates starts at `near`, or at the method itself.
    """
    seen = held if held.rows else fit
    least, best = math.inf, Change(NOTHING)

    def cost(option: Correction) -> float:
        nonlocal least, best
        change = option.fit(fit, shifts)
        found = float((weight * change.error(seen)).sum())
        if found < least:  # others are not kept: weights are large
            least, best = found, change
        return found

    first = cost(NOTHING)
    if not fit.rows:  # only held-out samples found room in this layer
        return best, first, first
    if first <= _ROUNDING * float((weight * seen.size).sum()):  # nothing that it reads has changed
        return best, first, first
    for option in method.simpler:
        cost(option)
    ladder = method.candidates(fit, cautious=not held.rows)
    begin = next((ladder.index(start) for start in (near, method) if start in ladder), 0)
    middle = cost(ladder[begin])
    for way in (1, -1):
        last, place = middle, begin + way
        while 0 <= place < len(ladder) and (now := cost(ladder[place])) < last:
            last, place = now, place + way
        if last < middle:
            break  # better on this side, so not on the other
    return best, least if least < math.inf else first, first
