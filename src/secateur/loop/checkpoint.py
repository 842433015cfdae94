"""Checkpoints of a run: one safetensors file with JSON in its header, replaced atomically. Nothing is unpickled.

The header also holds the identity of the run: short texts by which its model, data and functions are recognised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.errors import FileFormatError, SecateurError
from secateur.loop.settings import Repairer, Settings
from secateur.loop.steps import RunState
from secateur.plans.plan import Plan, plan_for
from secateur.plans.scores import Scores
from secateur.recover.checkpoint import FORMAT as TRAINING
from secateur.recover.checkpoint import Checkpoint as Training
from secateur.relevance.conservation import Conservation, Flow
from secateur.results.history import History
from secateur.running.batches import Data
from secateur.running.identity import data_identity, described, digest, digest_of_text, named, numbers
from secateur.running.processes import is_first, same_everywhere, wait
from secateur.running.tensor_files import decode, encode, fill, other_run, read_checkpoint, write_checkpoint
from secateur.structure.graph import Graph
from secateur.surgery.cut import cut
from secateur.surgery.optimizer import carry as carry_over
from secateur.surgery.provenance import remember

FORMAT = "secateur-loop-1"
_MOST_STEPS, _LARGEST_HEADER = 10**6, 64 * 2**20
#: Settings that older files do not have.
_ADDED = frozenset({"data", "loss", "finetune", "batch_size", "evaluate", "recover", "watch"})
#: The others, as they were before they could be set.
_LATER = {"uniform": False, "output": [], "blocks": False, "max_drift": None}
#: Settings that are too long to be shown.
_DIGESTS = frozenset({"weights", "data", "finetune", "recover", "watch"})


class Checkpoint:
    """The file of a run: written after each step, read when the same call is made again."""

    def __init__(self, path: Path, original: nn.Module, graph: Graph, settings: Settings, data: Data) -> None:
        self.path, self.original, self.graph, self.settings = path, original, graph, settings
        self.identity = {"model": graph.model_name, "weights": digest(original), **identity(settings, data)}
        tuner: Any = settings.schedule.finetune
        known = hasattr(tuner, "state_dict") and hasattr(tuner, "load_state_dict")
        self._stateful: list[Any] = [*settings.schedule.carry, *([tuner] if known else [])]

    @property
    def training(self) -> Training:
        """The file of the training within a step, beside this one."""
        place = self.path.with_name(f"{self.path.stem}-training{self.path.suffix}")
        decisive = {name: value for name, value in self.identity.items() if name != "watch"}
        return Training(place, {"run": digest_of_text(json.dumps(decisive))}, stale=True)

    def forget_training(self) -> None:
        """Delete that file: the last step is saved. That of an earlier step is not read by the next."""
        if self.settings.recover is not None:
            self.training.remove()

    def save(self, state: RunState) -> None:
        """Replace the file; a kill leaves the old or the new. Of several processes the first one writes."""
        if is_first():
            tensors = {f"model/{name}": tensor for name, tensor in numbers(state.model).items()}
            tensors |= {f"seen/{step}": heat for step, heat in state.seen.items()}
            carried = [encode(item.state_dict(), tensors, f"carry/{i}") for i, item in enumerate(self._stateful)]
            books = None
            if state.scores is not None:
                books = state.scores.conservation
                for i, producer in enumerate(self.graph.producers):
                    if producer.sites[0] in state.scores.units:
                        tensors[f"score/{i}"] = torch.from_numpy(state.scores.units[producer.sites[0]])
            header = {
                "format": FORMAT, "settings": self.identity, "step": state.step, "done": state.done, "carried": carried,
                "frozen": state.frozen,
                "plan": state.plan.to_json() if state.plan is not None else None,
                "history": json.loads(state.history.to_json()), "books": asdict(books) if books is not None else None,
                "blocks": dict(state.scores.blocks) if state.scores is not None else {},
            }  # fmt: skip
            write_checkpoint(self.path, tensors, header)
        wait()

    def restore(self, state: RunState) -> bool:
        """Bring a new state to where the file is; False if there is no file. The file of another run is refused."""
        if not same_everywhere(self.path.exists()):
            return False
        header, tensors = read_checkpoint(self.path, FORMAT)
        try:
            self._check_identity(header["settings"])
            self._fill(state, header, tensors)
        except (SecateurError, MemoryError):
            raise
        except Exception as error:  # `load_state_dict` of an optimizer or of the user's own may raise anything
            what = f"{self.path} is damaged: {type(error).__name__}: {error}"
            raise FileFormatError(what, where=self.path) from error
        wait()  # until all have read it
        return True

    def _fill(self, state: RunState, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        state.step, state.done = _counted(header["step"]), str(header["done"])
        state.frozen = dict(header.get("frozen", {}))
        if not all(isinstance(reason, str) for reason in state.frozen.values()) or not state.frozen.keys() <= {
            item.name for item in (*self.graph.layers, *self.graph.blocks)
        }:
            raise ValueError("the layers that stay are not the model's")
        if not 1 <= len(header["history"]) <= _MOST_STEPS:
            raise ValueError("the length of its history")
        state.history = History.from_json(json.dumps(header["history"]))
        plan, carried, books = header["plan"], header["carried"], header.get("books")
        if books is not None:
            books = Conservation(books["start"], books["input"], tuple(Flow(**flow) for flow in books["flows"]),
                                 float(books.get("size", 0.0)), str(books.get("composite", "")))  # fmt: skip
        if plan is not None:
            state.plan = self._plan(Plan.from_json(plan), state.frozen)
            small = cut(self.original, state.plan)
            for item in self.settings.schedule.carry:
                carry_over(item, state.model, small, state.plan)
            remember(small, self.original, state.plan)
            state.model = small
        fill(numbers(state.model), _under("model/", tensors), self.path, "the model")
        for item, saved in zip(self._stateful, carried, strict=True):
            item.load_state_dict(decode(saved, tensors))
        state.seen = {_counted(int(step)): heat for step, heat in _under("seen/", tensors).items()}
        if header["settings"].get("watch") != self.identity["watch"]:  # heat maps of other samples are not mixed
            state.seen, state.history.rows = {}, [replace(row, drift=None) for row in state.history]
        makers, criterion = self.graph.producers, self.settings.criterion
        units = {makers[int(i)].sites[0]: values.numpy() for i, values in _under("score/", tensors).items()}
        blocks = {str(name): float(value) for name, value in header.get("blocks", {}).items()}
        state.scores = Scores(criterion.name, units, criterion.aggregate, books, blocks) if units else None

    def _plan(self, found: Plan, frozen: Mapping[str, str]) -> Plan:
        """The plan that the graph makes of a saved one's groups. Any other content was not written by a run."""
        removed = np.zeros(len(self.graph.root), np.bool_)
        if max(found.groups, default=0) >= len(removed):
            raise ValueError("its plan has groups that the model does not have")
        removed[list(found.groups)] = True
        # A layer that stays since a later step still counts in the plan.
        known = {*found.layers, *(block.name for block in found.blocks)}
        stays = {name: reason for name, reason in frozen.items() if name not in known}
        made = plan_for(self.graph.frozen(stays), removed)
        if replace(found, before=made.before, after=made.after) != made:
            raise ValueError("its plan does not belong to its groups")
        return made

    def _check_identity(self, found: Mapping[str, Any]) -> None:
        wanted, found = json.loads(json.dumps(self.identity)), {**_LATER, **found}
        if not self.graph.heads:  # what older versions call the default of models without attention
            older = wanted["criterion"].replace("composite=None", "composite='alpha1beta0'")
            if found.get("criterion") == older.replace("start=None", "start='one'"):
                wanted["criterion"] = found["criterion"]
            if wanted["round_to"] is None and found.get("round_to") == 1:  # no difference there
                wanted["round_to"] = 1
        if self.settings.target.max_drift is None and None in (found.get("watch"), wanted["watch"]):
            wanted["watch"] = found.get("watch")  # what is watched for a report alone may come and go
        other = [key for key in wanted if found.get(key) != wanted[key] and (key in found or key not in _ADDED)]
        if other:
            raise other_run(self.path, {key: (found.get(key), wanted[key]) for key in other}, _DIGESTS)


def _counted(value: Any) -> int:
    """A number of steps. A run with another number would not end."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_STEPS:
        raise ValueError(f"{value!r} is no number of steps")
    return value


def is_checkpoint(path: Path) -> bool:
    """Whether a file was written as a checkpoint, damaged or not."""
    with suppress(OSError), path.open("rb") as file:
        head = file.read(8 + min(int.from_bytes(file.read(8), "little"), _LARGEST_HEADER))
        return FORMAT.encode() in head or TRAINING.encode() in head
    return False


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# -- what must be the same for a run to go on --------------------------------------------------------------------------
def identity(settings: Settings, data: Data) -> dict[str, Any]:
    """The settings and data of a run."""
    criterion, schedule = settings.criterion, settings.schedule
    own = {
        "criterion": described(criterion, without=("aggregate", "loss")), "rescore": schedule.rescore,
        "repair": _repair_name(settings.repair), **settings.request(),
    }  # fmt: skip
    # Each process may bring its own share of the data: that of the first one counts.
    shared = {
        "data": data_identity(data), "loss": described(criterion.loss), "batch_size": schedule.batch_size,
        # By name, so that a run goes on when such a function failed and was corrected.
        "finetune": named(schedule.finetune), "evaluate": named(settings.evaluate),
        "recover": described(settings.recover),
        "watch": None if settings.watch is None else data_identity(tuple(settings.watch)),
    }  # fmt: skip
    return own | dict(same_everywhere(shared))


def _repair_name(repair: Repairer | str | None) -> str | None:
    if repair is None or is_dataclass(repair):
        return None if repair is None else described(repair)
    return str(getattr(repair, "__name__", type(repair).__name__))
