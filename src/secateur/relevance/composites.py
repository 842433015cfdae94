"""Composites: which rule applies where, by kind of operation, depth or module path.

    mine = Composite(
        On(Box(), first=True),
        On(Epsilon(), kind="linear"),
        On(Gamma(0.25), modules="layer[34].*"),
        On(AlphaBeta(1, 0)),
    )

The first line that fits decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from secateur.errors import Argument, CriterionError
from secateur.relevance.attention import Attention
from secateur.relevance.rules import AlphaBeta, Box, Epsilon, Flat, Gamma, Norm, Rule

#: The kinds of operations for which there is a choice of rules.
KINDS = ("conv", "linear", "pool", "add", "matmul", "attention")


@dataclass(frozen=True)
class Place:
    """Where a rule is asked for: the kind of operation, the module path, and the depth among the weight layers."""

    kind: str
    path: str
    depth: float = 0.0  # 0 is the first conv or linear layer that ran, 1 the last
    first: bool = False  # reads the model's input


@dataclass(frozen=True)
class On:
    """One line of a composite: `rule` for the places that meet all the conditions given.

    `kind` is one kind or several ("conv", "linear", "pool", "add", "matmul", "attention"); `modules` are wildcards of
    module paths; `depth=(0.0, 0.5)` is the first half of the weight layers; `first` are those that read the input.
    """

    rule: Rule | Attention
    kind: str | Sequence[str] = ()
    modules: str | Sequence[str] = ()
    depth: tuple[float, float] | None = None
    first: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule | Attention):
            raise CriterionError("{rule} is no rule.", fix="a Rule or Attention", rule=Argument("rule", self.rule))
        kinds = [self.kind] if isinstance(self.kind, str) else self.kind
        if not set(kinds) <= set(KINDS):  # such a line would never fit
            what = "{kind} is no kind of operation."
            raise CriterionError(what, fix=f"of {', '.join(KINDS)}", kind=Argument("kind", self.kind))

    def fits(self, place: Place) -> bool:
        kinds = [self.kind] if isinstance(self.kind, str) else self.kind
        wildcards = [self.modules] if isinstance(self.modules, str) else self.modules
        return (
            (not kinds or place.kind in kinds)
            and (not wildcards or any(fnmatchcase(place.path, pattern) for pattern in wildcards))
            and (self.depth is None or self.depth[0] <= place.depth <= self.depth[1])
            and (self.first is None or self.first == place.first)
        )


class Composite:
    """Lines of rules. The first that fits a place decides. The default is α1β0, with attention weights as gates."""

    def __init__(self, *lines: On, name: str = "custom", modified_gradient: bool = False) -> None:
        if not all(isinstance(line, On) for line in lines):
            raise CriterionError(f"a composite has lines of the form On(rule, …), got {lines!r}.", fix="On(Epsilon())")
        self.lines, self.name = lines, name
        #: Whether the rules amount to input times a modified gradient (`gradients.py`), whatever the lines say.
        self.modified_gradient = modified_gradient

    @property
    def start(self) -> Literal["one", "logit"]:
        """The relevance that an output starts with unless told otherwise. Signed rules would turn a negative logit's
        relevance around if it started with 1, and a logit near 0 would outweigh all others."""
        return "logit" if self.modified_gradient else "one"

    @property
    def absolute(self) -> Literal[False, "square"]:
        """How the relevance of a unit adds up over positions unless told otherwise. Signed relevance cancels out over
        tokens; the mean square of its effect on the output says what would be lost."""
        return "square" if self.modified_gradient else False

    def rule(self, place: Place) -> Rule:
        """The rule for a layer, a pool, a sum or a product."""
        return next((on.rule for on in self.lines if isinstance(on.rule, Rule) and on.fits(place)), AlphaBeta(1, 0))

    def attention(self, place: Place) -> Attention:
        """How attention passes relevance."""
        return next((on.rule for on in self.lines if isinstance(on.rule, Attention) and on.fits(place)), Attention())

    @property
    def attention_by_depth(self) -> bool:
        """Whether how attention passes relevance depends on the depth."""
        return any(isinstance(on.rule, Attention) and on.depth is not None for on in self.lines)

    def __repr__(self) -> str:
        return f"Composite({', '.join(map(repr, self.lines))}, name={self.name!r})"


PRESETS: dict[str, Composite] = {
    # The paper: the same rule everywhere, so that the total is the same at every cut.
    "alpha1beta0": Composite(On(AlphaBeta(1, 0)), name="alpha1beta0"),
    # ε where outputs are few and signed, positive contributions everywhere else.
    "epsilon_plus": Composite(On(Epsilon(1e-6), kind="linear"), On(AlphaBeta(1, 0)), name="epsilon_plus"),
    # For heat maps: bounded pixels in the first layer, γ in the middle, ε in the last layers. Sums use γ too, because
    # signed shares explode where the summands cancel, which shows as blots.
    "epsilon_gamma_box": Composite(
        On(Box(), first=True, kind="conv"), On(Epsilon(1e-6), kind="linear"), On(Gamma(0.25)), name="epsilon_gamma_box"
    ),
    # Transformers, as published (arXiv 2402.05602): ε in layers and sums, queries and keys take part, products share
    # half and half. Biases and the constant part of a softmax absorb.
    "attnlrp": Composite(
        On(Attention(queries=True, constant="absorb")),
        On(Epsilon(1e-9, bias="absorb")),
        name="attnlrp",
        modified_gradient=True,
    ),
    # The same with γ in layers, sums and pools, and without absorption: less noise on images.
    "attnlrp_gamma": Composite(
        On(Attention(queries=True)), On(Norm(1e-9), kind="matmul"), On(Gamma(0.25)), name="attnlrp_gamma"
    ),
    # The rule set of the authors' ResNet script: ε in linear layers, pools and sums.
    "script-resnet": Composite(
        On(Epsilon(1e-6, bias="absorb"), kind="linear"),
        On(Norm(1e-6), kind=("pool", "add")),
        On(AlphaBeta(1, 0)),
        name="script-resnet",
    ),
    # Ignores values, and so shows the effect of the architecture alone. A baseline for the others.
    "flat": Composite(On(Flat()), name="flat"),
}


def composite_named(composite: str | Composite | Rule) -> Composite:
    """A preset by name, a composite as it is, or one rule for everything."""
    if isinstance(composite, Composite):
        return composite
    if isinstance(composite, Rule):
        return Composite(On(composite), name=repr(composite))
    given: object = composite
    if not isinstance(given, str) or given not in PRESETS:
        fix = f"a preset, of {', '.join(PRESETS)}; a Composite; or a Rule"
        raise CriterionError("there is no {given}.", fix=fix, given=Argument("composite", given))
    return PRESETS[given]
