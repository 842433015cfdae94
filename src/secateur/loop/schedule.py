"""The schedule of a run: how much leaves per step, and what happens between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secateur.errors import Argument, TargetError
from secateur.loop.finetune import Tuner
from secateur.plans.limits import brief
from secateur.plans.targets import check_share

#: Named groups of layers, by wildcards on module paths.
Parts = Mapping[str, Sequence[str]]


@dataclass(frozen=True, repr=False)
class Schedule:
    """How a run gets to its target: `prune(..., schedule=Schedule(step=0.1, finetune=FineTune(data)))`.

    Every `step` removes that share of the original units. `rescore` scores the units anew before each step. `one_shot`
    goes to the target at once. `parts` names groups of layers by wildcards, e.g.
    `{"conv": ["features.*"], "fc": ["classifier.*"]}`: steps take turns, and `remove` and `step` are shares of each.
    `finetune(model, step)` trains the model in place after each removal. Optimizers, schedulers and averaged models in
    `carry` follow the model through each removal. `batch_size` is that of scoring, if the data are a pair (X, y).
    `seed` decides every random choice.

    >>> Schedule(step=0.1, seed=3)
    Schedule(step=0.1, seed=3)
    """

    step: float | None = None
    rescore: bool | None = None
    one_shot: bool = False
    parts: Parts | None = None
    finetune: Tuner | None = None
    carry: Sequence[Any] = ()
    batch_size: int = 32
    seed: int = 0

    __repr__ = brief

    def __post_init__(self) -> None:
        object.__setattr__(self, "carry", tuple(self.carry))
        if self.step is not None:
            check_share("step", self.step)
        if self.one_shot and self.parts is not None and len(self.parts) > 1:
            raise TargetError("one_shot removes everything at once, but parts take turns.", fix="give one of the two")
        if not self.batch_size >= 1:
            raise TargetError("{given} must be at least 1.", given=Argument("batch_size", self.batch_size))

    @classmethod
    def of(cls, given: Schedule | float | None) -> Schedule:
        """A schedule from what a user may give. A number is the step."""
        if given is None:
            return cls()
        if isinstance(given, Schedule):
            return given
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise TargetError(
                f"schedule is a {type(given).__name__}.", fix="a number such as 0.05, the share per step, or a Schedule"
            )
        return cls(step=given)

    @property
    def stepwise(self) -> bool:
        """Whether the schedule asks for the paper's Algorithm 1: steps that are scored anew."""
        given = (self.step, self.parts, self.finetune)
        return any(item is not None for item in given) or bool(self.rescore) or bool(self.carry)
