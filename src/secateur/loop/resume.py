"""The checkpoint of a run: written after each step, read when the same call is made again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.loop.checkpoint import decode, digest, encode, numbers, read, whole, write
from secateur.loop.settings import Settings
from secateur.loop.steps import RunState
from secateur.plans.plan import Plan
from secateur.plans.scores import Scores
from secateur.relevance.conservation import Conservation, Flow
from secateur.results.history import History
from secateur.running.batches import Data
from secateur.running.processes import is_first, wait
from secateur.running.tensor_files import fill
from secateur.structure.graph import Graph
from secateur.surgery.cut import cut
from secateur.surgery.optimizer import carry as carry_over
from secateur.surgery.provenance import remember


@dataclass(frozen=True)
class Resumable:
    """A run that can be stopped and continued. `identity` is what must be the same then."""

    path: Path
    original: nn.Module
    graph: Graph
    settings: Settings
    identity: Mapping[str, Any]

    @classmethod
    def of(cls, path: Path, original: nn.Module, graph: Graph, settings: Settings, data: Data) -> Resumable:
        """The run of these settings, model and data."""
        known = {"model": graph.model_name, "weights": digest(original), **settings.identity(data)}
        return cls(path, original, graph, settings, known)

    def save(self, state: RunState) -> None:
        """Replace the file. In several processes the first one writes, and the others wait."""
        if is_first():
            tensors = {f"model/{name}": tensor for name, tensor in numbers(state.model).items()}
            carried = [encode(item.state_dict(), tensors, f"carry/{i}") for i, item in enumerate(self._stateful())]
            if state.scores is not None:
                for i, producer in enumerate(self.graph.producers):
                    if producer.sites[0] in state.scores.units:
                        tensors[f"score/{i}"] = torch.from_numpy(state.scores.units[producer.sites[0]])
            books = state.scores.conservation if state.scores is not None else None
            header = {
                "settings": self.identity, "step": state.step, "done": state.done, "carried": carried,
                "plan": state.plan.to_json() if state.plan is not None else None,
                "history": json.loads(state.history.to_json()), "books": asdict(books) if books is not None else None,
            }  # fmt: skip
            write(self.path, header, tensors)
        wait()

    def restore(self, state: RunState) -> bool:
        """Bring a new state to where the file is; False if there is no file."""
        found = read(self.path, self.identity)
        if found is None:
            return False
        header, tensors = found
        criterion, carry = self.settings.criterion, self.settings.schedule.carry
        with whole(self.path):
            state.step, state.done = int(header["step"]), str(header["done"])
            state.history = History.from_json(json.dumps(header["history"]))
            plan, carried, books = header["plan"], header["carried"], header.get("books")
            flows = tuple(Flow(**flow) for flow in books["flows"]) if books is not None else ()
            known = Conservation(books["start"], books["input"], flows) if books is not None else None
        if plan is not None:
            state.plan = replace(Plan.from_json(plan), example=self.graph.example)
            small = cut(self.original, state.plan)
            for item in carry:
                carry_over(item, state.model, small, state.plan)
            remember(small, self.original, state.plan)
            state.model = small
        fill(numbers(state.model), _under("model/", tensors), self.path, "the model")
        for item, saved in zip(self._stateful(), carried, strict=True):
            item.load_state_dict(decode(saved, tensors))
        units = {
            self.graph.producers[int(index)].sites[0]: values.numpy()
            for index, values in _under("score/", tensors).items()
        }
        state.scores = Scores(criterion.name, units, criterion.aggregate, known) if units else None
        return True

    def _stateful(self) -> list[Any]:
        """Everything whose state must survive a kill."""
        tuner: Any = self.settings.schedule.finetune
        known = hasattr(tuner, "state_dict") and hasattr(tuner, "load_state_dict")
        return [*self.settings.schedule.carry, *([tuner] if known else [])]


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
