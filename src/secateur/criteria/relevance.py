"""LRP: the relevance that passes through each unit, Σ R over samples and positions. Layers are not normalised.

Under "attnlrp" relevance has signs, which cancel out over tokens. There, squares are added up: Σ R².

Units that only make a gate (squeeze-and-excitation, queries, keys) get no relevance. They are scored by the relevance
that the gate lets pass. Without that their score would be 0, and they would always leave first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from secateur.arguments import check_choice
from secateur.criteria.criterion import Accumulator, Criterion, Subject, Sums
from secateur.errors import Argument, CriterionError, SecateurError, SecateurWarning
from secateur.relevance.composites import PRESETS, Composite
from secateur.relevance.engine import RelevancePass
from secateur.relevance.ledger import Absolute
from secateur.relevance.rules import Rule
from secateur.relevance.starts import AtGoal, How, begun
from secateur.running.batches import size_of
from secateur.running.copies import named_tensors
from secateur.running.goals import Aim, Goal, goal_of
from secateur.running.sandbox import refusal
from secateur.running.targets import Reader


@dataclass(frozen=True)
class LRP(Criterion):
    """Relevance by any composite: by default "attnlrp" for transformers, "alpha1beta0" for all others.

    What counts as a transformer is a model with attention whose weights are not mostly those of convolutions.

    Every sample starts at its true class, or the predicted one without targets: with 1 or, under "attnlrp", with its
    logit. If there is an answer for each position (a token, a pixel), each that counts starts so. `start` says
    otherwise: "one", "logit", a goal such as `Detection()` or `Similarity()`, or a function `f(output, targets)` that
    returns what counts, one number or one per sample, or the relevance of each number of the output. Where targets are
    boxes, `Detection()` is the default. Relevance is added up, squared under "attnlrp"; `absolute` says otherwise.
    Without targets, a language model that generates text starts at the next token of its input, and a model without a
    head at all numbers of its states, with their squares. A model with one output has no output for class 0, so every
    sample starts there, whatever its target.
    """

    #: Relevance is conserved: the scores of each layer are shares of one sum.
    comparable: ClassVar[bool] = True
    unseen_is_zero: ClassVar[bool] = True

    name: str = "lrp"
    composite: str | Composite | Rule | None = None
    start: Literal["one", "logit"] | Aim | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.start, Goal) and not callable(self.start):
            check_choice("start", self.start, (None, "one", "logit"), error=CriterionError)
        if self.loss is not None:
            what, fix = "LRP starts at the output, and has no loss.", "{start}, a goal or a function f(output, targets)"
            raise CriterionError(what, fix=fix, start=Argument("start"))
        if isinstance(self.composite, str) and self.composite not in PRESETS:
            raise CriterionError(f"there is no composite {self.composite!r}.", fix=f"a preset, of {', '.join(PRESETS)}")

    def accumulate(self, subject: Subject) -> RelevanceSums:
        return RelevanceSums(subject, self)


class RelevanceSums(Accumulator):
    """Adds up relevance in the relevance pass itself, and keeps its record of conservation."""

    def __init__(self, subject: Subject, criterion: LRP) -> None:
        super().__init__(subject)
        self.criterion = criterion
        absolute: Absolute | None = None if criterion.absolute is None else False
        if criterion.absolute in ("sample", "square"):
            absolute = criterion.absolute
        self.reader = Reader(subject.model)
        self.engine = RelevancePass(subject.model, criterion.composite, absolute=absolute, heat_map=False)

    def update(self, inputs: Any, targets: Any) -> None:
        count, start = size_of(inputs), self.criterion.start
        aim = goal_of(None if isinstance(start, str) else start, targets)

        def how() -> How:
            return start if isinstance(start, str) else self.engine.composite.start

        def begin(output: Tensor) -> Tensor:
            return begun(self.reader, inputs, targets, output, how, count, self.engine.entry)

        try:
            self.engine.run(inputs, begin if aim is None else AtGoal(aim, targets, how))
        except (SecateurError, SecateurWarning):
            raise
        except Exception as error:
            raise refusal(self.subject.model, "a batch", inputs, error) from error
        self.sums.samples += count

    def close(self) -> Sums:
        """From sums by parameter to sums by producer."""
        units, known = self.engine.units, self.engine.places
        parameters = {name for name, _ in named_tensors(self.subject.model)}

        def holds(index: int, at: tuple[str, int, int]) -> bool:
            return self.subject.holds(index, at[0], lambda _: at[1])

        for i, producer in enumerate(self.subject.producers):
            own = {known[site] for site in producer.sites if site in known}
            places = {at for at in own if at[0] not in parameters or holds(i, at)}
            if not places:
                others = {at for at in known.values() if holds(i, at)}
                places = others if len(others) == 1 else own
            for name, first, last in places:  # a reused weight is one place, since the pass has added up its uses
                self.sums.add(i, units[name][first:last])
        if self.sums.samples:
            self.sums.books = self.engine.conservation()
            self.sums.books.warn()
        return self.sums
