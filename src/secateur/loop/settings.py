"""What a run was asked for: its schedule, its other settings, and how every default is decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from secateur import arguments
from secateur.criteria.criterion import Criterion
from secateur.errors import SecateurError, TargetError
from secateur.plans.targets import Limits, Scope, Target, brief, check_share
from secateur.recover import Recover
from secateur.repair import Repair
from secateur.running.batches import Data
from secateur.runtimes import Latency, Setup

#: `f(model)` returns an accuracy, or a dict with "overall" and a number per class.
Evaluate = Callable[[nn.Module], float | Mapping[str, float]]
#: `f(small, original, data)` returns a corrected module of the same shapes.
Repairer = Callable[[nn.Module, nn.Module, Data], nn.Module]
#: `f(model, step)` trains the model in place.
Tuner = Callable[[nn.Module, int], Any]
#: Named groups of layers, by wildcards on module paths.
Parts = Mapping[str, Sequence[str]]


@dataclass(frozen=True, repr=False)
class Schedule:
    """How a run gets to its target: `prune(..., schedule=Schedule(step=0.1))`.

    Every `step` removes that share of the original units. `rescore` scores the units anew before each step. `one_shot`
    goes to the target at once. `parts` names groups of layers by wildcards, e.g.
    `{"conv": ["features.*"], "fc": ["classifier.*"]}`: steps take turns, and `remove` and `step` are shares of each.
    `finetune(model, step)` is your own training, in place, after each removal; `prune(recover=…)` is ours. Optimizers,
    schedulers and averaged models in `carry` follow the model through each removal. `batch_size` is that of scoring, if
    the data are a pair (X, y). `seed` decides every random choice.

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
        if self.step is not None:
            check_share("step", self.step)
        for name in ("one_shot", "rescore"):
            if getattr(self, name) is not None:
                arguments.check_flag(name, getattr(self, name), error=TargetError)
        if self.parts is not None:
            fix = "{'conv': ['features.*'], 'fc': ['classifier.*']}"
            arguments.check_kind("parts", self.parts, Mapping, fix, error=TargetError)
            if not self.parts:
                raise TargetError("parts names no part.", fix=fix)
            named = {part: arguments.patterns("parts", given, error=TargetError) for part, given in self.parts.items()}
            object.__setattr__(self, "parts", named)
        arguments.check_callable("finetune", self.finetune, "a function f(model, step)")
        arguments.check_kind("carry", self.carry, (tuple, list), "a list of optimizers, such as [optimizer]")
        object.__setattr__(self, "carry", tuple(self.carry))
        if self.one_shot and self.parts is not None and len(self.parts) > 1:
            raise TargetError("one_shot removes everything at once, but parts take turns.", fix="give one of the two")
        arguments.check_count("batch_size", self.batch_size, error=TargetError)
        arguments.check_count("seed", self.seed, None)

    @classmethod
    def of(cls, given: Schedule | float | None) -> Schedule:
        """A schedule from what a user may give. A number is the step."""
        if given is None:
            return cls()
        if isinstance(given, Schedule):
            return given
        if isinstance(given, bool) or not isinstance(given, int | float):
            fix = "a number such as 0.05, the share per step, or a Schedule"
            raise TargetError(f"schedule is a {type(given).__name__}.", fix=fix)
        return cls(step=given)

    @property
    def stepwise(self) -> bool:
        """Whether the schedule asks for the paper's Algorithm 1: steps that are scored anew."""
        given = (self.step, self.parts, self.finetune)
        return any(item is not None for item in given) or bool(self.rescore) or bool(self.carry)


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run, besides the model and the data. `decided` fills in what is left open."""

    criterion: Criterion
    target: Target
    schedule: Schedule = field(default_factory=Schedule)
    limits: Limits = field(default_factory=Limits)
    repair: Repairer | str | None = "auto"
    evaluate: Evaluate | None = None
    #: Which of the things that the model returns count, as in `analyze`.
    output: str | Sequence[str] = ()
    latency: Latency | Setup | None = None
    recover: Recover | None = None
    #: Samples (inputs, targets) whose heat maps are kept after each step.
    watch: tuple[Any, Any] | None = None

    def __post_init__(self) -> None:
        target, schedule = self.target, self.schedule
        arguments.check_callable("evaluate", self.evaluate, "a function f(model) that returns an accuracy")
        if not isinstance(self.repair, str):
            arguments.check_callable("repair", self.repair, "'best', None, a Repair, or f(small, original, data)")
        elif self.repair not in ("auto", "none"):
            Repair(self.repair)
        if target.max_drop is not None and self.evaluate is None:
            raise SecateurError("max_drop needs a measure of the drop.", fix="evaluate=f(model)")
        if self.watch is not None:
            arguments.check_kind("watch", self.watch, (tuple, list), "a pair (inputs, targets); targets may be None")
        if self.latency is not None:
            fix = "the table of secateur.latency(model, example), or a secateur.runtimes.Setup"
            arguments.check_kind("latency", self.latency, (Latency, Setup), fix)
        if schedule.parts is not None and (target.keep is not None or self.limits.only != ("*",)):
            raise TargetError("parts take turns by share of units.", fix="remove=… instead of keep=…, and no only=…")

    def decided(self, data: Data) -> Settings:
        """Decide what the user left open. This is the only place that knows the defaults of `prune`."""
        target, schedule, limits, repair = self.target, self.schedule, self.limits, self.repair
        if repair == "auto":  # repair if nothing else makes up for the loss, and if there are samples to learn from
            no_samples = data is None or (self.criterion.data is False and is_example(data))
            repair = None if schedule.stepwise or no_samples else "best"
        if isinstance(repair, str):
            repair = None if repair == "none" else Repair(repair)
        rescore, one_shot = schedule.rescore, schedule.one_shot
        if rescore is None:
            rescore = (
                repair is None or schedule.finetune is not None or (self.recover is not None and schedule.stepwise)
            )
        if limits.scope is None:
            scope: Scope = "global" if rescore else "cost" if self.criterion.comparable else "layer"
            limits = replace(limits, scope=scope)
        if schedule.step is None:
            one_shot |= not (rescore or target.bounded or schedule.parts)
        schedule = replace(schedule, rescore=rescore, one_shot=one_shot)
        return replace(self, schedule=schedule, limits=limits, repair=repair)

    @property
    def setup(self) -> Setup | None:
        """Where the model will run, where that is known."""
        return self.latency.setup if isinstance(self.latency, Latency) else self.latency

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
        drop, moved = self.target.max_drop, self.target.max_drift
        return {
            "aggregate": self.criterion.aggregate, "seed": self.schedule.seed,
            "max_drop": dict(drop) if isinstance(drop, Mapping) else drop,
            "max_drift": dict(moved) if isinstance(moved, Mapping) else moved,
            "remove": self.target.remove, "keep": dict(self.target.keep or {}), "step": self.step,
            "one_shot": self.schedule.one_shot, "parts": {name: list(paths) for name, paths in self.parts.items()},
            "scope": self.limits.scope, "min_units": self.limits.min_units, "round_to": self.limits.round_to,
            "ignore": list(self.limits.ignore), "uniform": self.limits.uniform,
            "output": [self.output] if isinstance(self.output, str) else list(self.output),
            "blocks": self.limits.blocks,
            **({"latency": setup.to_dict()} if self.target.timed and (setup := self.setup) is not None else {}),
        }  # fmt: skip

    def shown(self) -> dict[str, Any]:
        """What was asked for, for the report."""
        calls = {
            "evaluate": self.evaluate, "repair": self.repair, "finetune": self.schedule.finetune,
            "loss": self.criterion.loss,
        }  # fmt: skip
        trained = {"recover": repr(self.recover)} if self.recover is not None else {}
        return {
            "criterion": self.criterion.name, "scored_by": repr(self.criterion), **self.request(),
            "batch_size": self.schedule.batch_size,
            **{name: getattr(call, "__name__", type(call).__name__) for name, call in calls.items() if call}, **trained,
        }  # fmt: skip


def repair_of(given: Repairer | str | bool | None) -> Repairer | str | None:
    """The repair that a user asks for: True is for the usual one, False for none."""
    if isinstance(given, bool):
        return "auto" if given else None
    return given


def is_example(data: Data) -> bool:
    """Whether the data are one batch without targets: an input to analyse the model with, not samples to learn from."""
    return isinstance(data, list) and len(data) == 1 and isinstance(data[0], tuple | list) and data[0][-1] is None
