"""What a run was asked for, with every default decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from torch import nn

from secateur.criteria.criterion import Criterion
from secateur.errors import SecateurError, TargetError
from secateur.loop.callbacks import Evaluate, Repairer
from secateur.loop.identity import data_identity, described
from secateur.loop.schedule import Schedule
from secateur.plans.limits import Limits, Scope
from secateur.plans.targets import Target
from secateur.repair import Repair
from secateur.running.batches import Data
from secateur.running.processes import same_everywhere
from secateur.running.progress import Listener

#: Takes a smaller model and returns it repaired.
Corrector = Callable[[nn.Module], nn.Module]
_STEP = 0.05


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
        target, schedule, limits = self.target, self.schedule, self.limits
        only_example = self.criterion.data is False and _is_example(data)
        repair = _repairer(self.repair, possible=not (schedule.stepwise or data is None or only_example))
        rescore = schedule.rescore
        if rescore is None:
            rescore = repair is None or schedule.finetune is not None
        if limits.scope is None:
            by_price: Scope = "time" if target.timed else "cost"
            scope: Scope = "global" if rescore else by_price if self.criterion.comparable else "layer"
            limits = replace(limits, scope=scope)
        one_shot, step = schedule.one_shot, schedule.step
        if step is None:
            one_shot = one_shot or not (rescore or target.timed or target.max_drop is not None or schedule.parts)
            step = _STEP
        schedule = replace(schedule, step=step, rescore=rescore, one_shot=one_shot)
        return replace(self, schedule=schedule, limits=limits, repair=repair)

    @property
    def step(self) -> float:
        """The share of the units that leaves per step."""
        return _STEP if self.schedule.step is None else self.schedule.step

    def repairer(self, original: nn.Module, data: Data, tell: Listener) -> Corrector | None:
        """A function that repairs smaller models of the original; None if there is no repair."""
        repair = self.repair
        assert not isinstance(repair, str)
        if repair is None:
            return None
        open_session = getattr(repair, "session", None)
        if open_session is None:
            return lambda small: repair(small, original, data)
        session = open_session(original, data)  # what the original answers is computed once for all steps
        return lambda small: session.examine(small, tell).model

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

    def identity(self, data: Data) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        own = {
            "criterion": _criterion(self.criterion), "rescore": self.schedule.rescore,
            "repair": _repair_name(self.repair), **self.request(),
        }  # fmt: skip
        # Each process may bring its own share of the data: that of the first one counts.
        shared = {
            "data": data_identity(data), "loss": described(self.criterion.loss), "batch_size": self.schedule.batch_size,
            "finetune": described(self.schedule.finetune),
        }  # fmt: skip
        return own | dict(same_everywhere(shared))

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


def _repairer(asked: Repairer | str | None, possible: bool) -> Repairer | None:
    """What repairs the model after a removal; "auto" repairs if nothing else makes up for the loss."""
    if asked == "auto":
        asked = "best" if possible else None
    if asked is None or asked == "none":
        return None
    if isinstance(asked, str):
        return Repair(asked)
    return asked


def _is_example(data: Data) -> bool:
    """Whether the data are one batch without targets: an input to analyse the model with, not samples to learn from."""
    return isinstance(data, list) and len(data) == 1 and isinstance(data[0], tuple | list) and data[0][-1] is None


def _criterion(criterion: Criterion) -> str:
    """The criterion's settings as text, without those that have a place of their own."""
    own = [item.name for item in fields(criterion) if item.repr and item.name not in ("aggregate", "loss")]
    shown = ", ".join(f"{name}={described(getattr(criterion, name))}" for name in own)
    return f"{type(criterion).__qualname__}({shown})"


def _repair_name(repair: Repairer | str | None) -> str | None:
    if repair is None or is_dataclass(repair):
        return None if repair is None else described(repair)
    return str(getattr(repair, "__name__", type(repair).__name__))
