"""Where the loop is going: how much may be gone after each step, and when it is there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from secateur.errors import NothingToPruneError, TargetError
from secateur.plans.plan import Plan
from secateur.plans.ranking import named_layers
from secateur.plans.ranking import plan as make_plan
from secateur.plans.scores import Scores
from secateur.structure.graph import Graph

_WORDS = {"params": "parameters", "macs": "MACs"}

#: Named groups of layers, by wildcards on module paths.
Parts = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Proposal:
    """The next plan, the part of the model it works on, and whether it is the last; or None and why there is none."""

    plan: Plan | None
    part: str = ""
    last: bool = False
    reason: str = ""


class Goal:
    """A target, and the steps towards it."""

    def __init__(
        self,
        graph: Graph,
        remove: float | None,
        keep: Mapping[str, float] | None,
        step: float,
        one_shot: bool,
        parts: Parts | None,
        options: Mapping[str, Any],
        open_end: bool,
    ) -> None:
        if remove is not None and keep is not None:
            raise TargetError("give one target: remove=fraction or keep={…}, not both.")
        if remove is None and keep is None and not open_end:
            raise TargetError("give a target: remove=fraction, keep={'params', 'macs' or 'latency': …}, or max_drop=…")
        if not 0 < step < 1:
            raise TargetError(f"step={step} must lie strictly between 0 and 1: the share of the units per step.")
        if remove is not None and not 0 < remove < 1:
            raise TargetError(f"remove={remove} must lie strictly between 0 and 1: the share of units that leaves.")
        if parts is not None and keep is not None:
            raise TargetError("parts take turns by share of units; give remove=…, not keep=…")
        if one_shot and parts is not None and len(parts) > 1:
            raise TargetError("one_shot removes everything at once; parts take turns. Give one of the two.")
        self.graph, self.remove, self.step, self.one_shot = graph, remove, step, one_shot
        self.options = {**options, "ignore": named_layers(graph, "ignore", options["ignore"])}
        self.parts = {name: list(patterns) for name, patterns in (parts or {"": ["*"]}).items()}
        self.keep = {k: v for k, v in (keep or {}).items() if k not in ("latency", "seconds")}
        self.time = {k: v for k, v in (keep or {}).items() if k in ("latency", "seconds")}
        self.timed = bool(self.time)
        self.seconds = math.inf
        if len(self.time) > 1:
            raise TargetError("give 'latency' (a share of what is measured) or 'seconds', not both.")
        if self.timed and (not next(iter(self.time.values())) > 0 or self.time.get("latency", 0) > 1):
            raise TargetError(f"keep={self.time} makes no sense: 'latency' is a share up to 1, 'seconds' is positive.")
        if self.timed and (one_shot or self.keep):
            raise TargetError("a latency is approached step by step, and alone: no one_shot, no other bound with it.")
        self._check_reachable()

    @property
    def steps(self) -> int | None:
        """How many steps the run takes, where that is known."""
        if self.one_shot:
            return 1
        return None if self.remove is None else math.ceil(self.remove / self.step - 1e-9) * len(self.parts)

    def settings(self) -> dict[str, Any]:
        """What identifies this goal in a checkpoint."""
        return {
            "remove": self.remove, "keep": {**self.keep, **self.time}, "step": self.step, "one_shot": self.one_shot,
            "parts": self.parts, **{k: list(v) if isinstance(v, tuple) else v for k, v in self.options.items()},
        }  # fmt: skip

    def reached(self, plan: Plan, otherwise: str = "the target is met") -> str:
        """In words: how close a plan came to the target, where rounding is to blame."""
        round_to = self.options["round_to"]
        because = f"since widths are multiples of {round_to}"
        gone = 1 - plan.units[1] / plan.units[0]
        if self.remove is not None and round_to > 1 and gone < self.remove - 0.01:
            return f"{100 * gone:.0f} % of the units are gone instead of {100 * self.remove:g} %, {because}"
        for name, limit in self.keep.items():
            share = getattr(plan.after, name) / (limit if limit > 1 else limit * getattr(plan.before, name))
            if round_to > 1 and share < 0.95:
                return f"the target is met with {100 * (1 - share):.0f} % fewer {_WORDS[name]} than allowed, {because}"
        return otherwise

    def start(self, latency: float | None) -> None:
        """Learn the latency of the unpruned model, of which the target may be a share."""
        if self.timed:
            assert latency is not None
            self.seconds = self.time["seconds"] if "seconds" in self.time else self.time["latency"] * latency

    def propose(self, scores: Scores, start: Plan | None, number: int) -> Proposal:
        """What should be gone after step `number`. A step too small for any group waits for the next."""
        part, turn = list(self.parts)[(number - 1) % len(self.parts)], (number - 1) // len(self.parts) + 1
        if self.keep:
            final = make_plan(self.graph, scores, keep=self.keep, start=start, **self.options)
            if self.one_shot or self._removed(final, part) <= self._units(part, turn * self.step):
                return Proposal(final, part, last=True)
        share, last = self._share(turn)
        last = last and number % len(self.parts) == 0
        try:
            found = self.exactly(scores, start, share, number)
        except (TargetError, NothingToPruneError):
            if self.remove is not None or self.keep:
                raise
            return Proposal(None, part, reason="nothing more may leave: every layer is down to min_units or ignored")
        if found is None:
            found = start if start is not None else self._nothing(last, share)
        return Proposal(found, part, last)

    def idle(self, start: Plan | None, number: int) -> bool:
        """Whether step `number` asks for no more than is gone, so that there is no need to score."""
        if self.keep or self.timed:
            return False
        part, turn = list(self.parts)[(number - 1) % len(self.parts)], (number - 1) // len(self.parts) + 1
        share, last = self._share(turn)
        gone = 0 if start is None else self._removed(start, part)
        return not last and self._units(part, share) <= gone

    def exactly(self, scores: Scores, start: Plan | None, share: float, number: int) -> Plan | None:
        """The plan in which `share` of the part's units are gone; None if that is no more than is gone already."""
        part = list(self.parts)[(number - 1) % len(self.parts)]
        gone = 0 if start is None else start.units[0] - start.units[1]
        more = self._units(part, share) - (0 if start is None else self._removed(start, part))
        if more <= 0:
            return None
        wanted = (gone + more) / self.graph.total_units
        try:
            return make_plan(
                self.graph, scores, remove=wanted, only=self.parts[part], start=start, **self.options
            )  # fmt: skip
        except NothingToPruneError:
            if self._may_leave(part, start):
                return None  # the smallest group is larger than this step
            raise

    def bounds(self, start: Plan | None, number: int) -> tuple[float, float]:
        """The shares between which step `number` lies."""
        return max(number - 1, 0) * self.step, self._share(number)[0]

    def _share(self, turn: int) -> tuple[float, bool]:
        if self.remove is None:
            return min(turn * self.step, 1 - 1e-12), False
        if self.one_shot:
            return self.remove, True
        share = turn * self.step
        return (self.remove, True) if share >= self.remove - 1e-9 else (share, False)

    def _units(self, part: str, share: float) -> int:
        total = self.graph.total_units if not part else int(self.graph.units[self._candidates(part)].sum())
        return math.floor(share * total + 1e-9)

    def _candidates(self, part: str) -> Any:
        layers = [layer for layer in self.graph.layers if layer.matches(self.parts[part])]
        if not layers:
            raise TargetError(f"parts[{part!r}]={self.parts[part]} matches no layer. `print(graph)` shows their names.")
        groups = np.concatenate([layer.groups for layer in layers])
        return groups[self.graph.prunable[groups]]

    def _removed(self, plan: Plan, part: str) -> int:
        if not part:
            return plan.units[0] - plan.units[1]
        gone = np.zeros(len(self.graph.root), np.bool_)
        gone[list(plan.groups)] = True
        mine = self._candidates(part)
        return int(self.graph.units[mine[gone[mine]]].sum())

    def _may_leave(self, part: str, start: Plan | None) -> bool:
        gone = set(start.groups) if start is not None else set()
        ignored = [layer for layer in self.graph.layers if layer.matches(self.options["ignore"])]
        blocked = gone.union(*(layer.groups.tolist() for layer in ignored)) if ignored else gone
        return any(group not in blocked for group in self._candidates(part).tolist())

    def _nothing(self, last: bool, share: float) -> Plan | None:
        if last:
            raise NothingToPruneError(
                f"remove={share} of {self.graph.total_units} units is less than the smallest group, or than what "
                f"round_to={self.options['round_to']} leaves room for: nothing leaves."
            )
        return None

    def _check_reachable(self) -> None:
        """Fail before any work is done if the target cannot be met whatever the scores are."""
        flat = Scores("any", {p.sites[0]: np.ones(len(p.labels)) for p in self.graph.producers})
        if self.keep:
            make_plan(self.graph, flat, keep=self.keep, **self.options)
        elif self.remove is not None:
            for number, part in enumerate(self.parts, 1):
                self._candidates(part)
                self.exactly(flat, None, self.remove, number)
        elif not self._may_leave(next(iter(self.parts)), None):
            make_plan(self.graph, flat, remove=0.5, **self.options)
