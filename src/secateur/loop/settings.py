"""What a run was asked for, with every default decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from secateur.criteria.criterion import Criterion
from secateur.errors import SecateurError, TargetError
from secateur.loop.callbacks import Evaluate, Repairer
from secateur.loop.schedule import Schedule
from secateur.plans.limits import Limits, Scope
from secateur.plans.targets import Target
from secateur.repair import Repair
from secateur.running.batches import Data


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run, besides the model and the data. `decided` fills in what is left open."""

    criterion: Criterion
    target: Target
    schedule: Schedule = field(default_factory=Schedule)
    limits: Limits = field(default_factory=Limits)
    repair: Repairer | str | None = "auto"
    evaluate: Evaluate | None = None

    def __post_init__(self) -> None:
        target, schedule = self.target, self.schedule
        if target.max_drop is not None and self.evaluate is None:
            raise SecateurError("max_drop needs a measure of the drop.", fix="evaluate=f(model)")
        if target.timed and schedule.one_shot:
            raise TargetError("a latency is approached step by step.", fix="leave out one_shot")
        if schedule.parts is not None and (target.keep is not None or self.limits.only != ("*",)):
            raise TargetError("parts take turns by share of units.", fix="remove=… instead of keep=…, and no only=…")

    def decided(self, data: Data) -> Settings:
        """Decide what the user left open. This is the only place that knows the defaults of `prune`."""
        target, schedule, limits, repair = self.target, self.schedule, self.limits, self.repair
        if repair == "auto":  # repair if nothing else makes up for the loss, and if there are samples to learn from
            no_samples = data is None or (self.criterion.data is False and _is_example(data))
            repair = None if schedule.stepwise or no_samples else "best"
        if isinstance(repair, str):
            repair = None if repair == "none" else Repair(repair)
        rescore, one_shot = schedule.rescore, schedule.one_shot
        if rescore is None:
            rescore = repair is None or schedule.finetune is not None
        if limits.scope is None:
            by_price: Scope = "time" if target.timed else "cost"
            scope: Scope = "global" if rescore else by_price if self.criterion.comparable else "layer"
            limits = replace(limits, scope=scope)
        if schedule.step is None:
            one_shot |= not (rescore or target.timed or target.max_drop is not None or schedule.parts)
        schedule = replace(schedule, rescore=rescore, one_shot=one_shot)
        return replace(self, schedule=schedule, limits=limits, repair=repair)

    @property
    def step(self) -> float:
        """The share of the units that leaves per step."""
        return 0.05 if self.schedule.step is None else self.schedule.step

    @property
    def parts(self) -> dict[str, Sequence[str]]:
        """The layers of each part; without parts, all that may lose units."""
        return dict(self.schedule.parts or {"": self.limits.only})

    def request(self) -> dict[str, Any]:
        """Target, steps and limits as plain values."""
        drop = self.target.max_drop
        return {
            "aggregate": self.criterion.aggregate, "seed": self.schedule.seed,
            "max_drop": dict(drop) if isinstance(drop, Mapping) else drop,
            "remove": self.target.remove, "keep": dict(self.target.keep or {}), "step": self.step,
            "one_shot": self.schedule.one_shot, "parts": {name: list(paths) for name, paths in self.parts.items()},
            "scope": self.limits.scope, "min_units": self.limits.min_units, "round_to": self.limits.round_to,
            "ignore": list(self.limits.ignore),
        }  # fmt: skip

    def shown(self) -> dict[str, Any]:
        """What was asked for, for the report."""
        calls = {
            "evaluate": self.evaluate, "repair": self.repair, "finetune": self.schedule.finetune,
            "loss": self.criterion.loss,
        }  # fmt: skip
        return {
            "criterion": self.criterion.name, "scored_by": repr(self.criterion), **self.request(),
            "batch_size": self.schedule.batch_size,
            **{name: getattr(call, "__name__", type(call).__name__) for name, call in calls.items() if call},
        }  # fmt: skip


def _is_example(data: Data) -> bool:
    """Whether the data are one batch without targets: an input to analyse the model with, not samples to learn from."""
    return isinstance(data, list) and len(data) == 1 and isinstance(data[0], tuple | list) and data[0][-1] is None
