"""What the two image experiments share: settings, the list of runs to do, one pruning, and several processes."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from reproduction.pool import Pool
from reproduction.runs import Folder, Run
from reproduction.uncoupled import prune_uncoupled
from secateur.atomic import write
from secateur.criteria.registry import criterion_named
from secateur.data.views import View
from secateur.errors import SecateurError
from secateur.loop.prune import run_loop
from secateur.loop.settings import Schedule, Tuner
from secateur.loop.settings import Settings as LoopSettings
from secateur.plans.targets import Target
from secateur.results.history import History

#: `paper` masks every filter on its own, `physical` removes coupled filters together.
MODES = ("paper", "physical")
#: Called with a line about what was just finished.
Report = Callable[[str], None]

# Settings that do not change the result of a run.
_ASIDE = ("images", "weights", "score_batch")


@dataclass(frozen=True)
class Settings:
    """What to do. The defaults are the paper's."""

    model: str
    data: str
    images: str
    weights: str | None = None
    early_strides: bool = False
    step: float = 0.05
    steps: int = 18
    prepare_epochs: int = 200
    score_batch: int = 50
    size: int = 224

    @property
    def view(self) -> View:
        """Both sides are scaled to one size, as in the paper."""
        return View(self.size, "squash")

    @property
    def name(self) -> str:
        """For folders and headings."""
        model = self.model.rpartition(":")[2].partition("?")[0]
        return f"{model}-{self.data.replace('+', '-')}"

    def recorded(self) -> dict[str, Any]:
        """What identifies a run. The place of its files is not part of it."""
        return {k: v for k, v in asdict(self).items() if k not in _ASIDE}


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Task(Generic[S]):
    """One run. It is sent to another process."""

    settings: S
    folder: Path
    draw: int
    mode: str
    criterion: str
    device: str

    @property
    def checkpoint(self) -> Path:
        """The file that the run resumes from."""
        return Folder(self.folder).checkpoint(self.draw, self.mode, self.criterion)

    def prune(
        self, model: nn.Module, data: Any, evaluate: Any, parts: Mapping[str, Sequence[str]] | None,
        finetune: Tuner | None = None, **options: Any,
    ) -> History:  # fmt: skip
        """Mask or remove filters in steps, by the criterion and in the mode of the task."""
        settings = self.settings
        goal, step = settings.steps * settings.step, settings.step
        steps: dict[str, Any] = {"finetune": finetune, "batch_size": settings.score_batch, "seed": self.draw}
        if self.mode == "paper":
            options |= {"evaluate": evaluate, **steps}
            return prune_uncoupled(model, data, self.criterion, goal, step, **options).history
        asked = LoopSettings(
            criterion_named(self.criterion), Target(goal), Schedule(step, parts=parts, **steps), evaluate=evaluate
        )
        return run_loop(model, data, asked, progress=False, **options).history

    def finish(self, history: History, seconds: float, outcome: str) -> str:
        """Write the finished run. Returns a line about it."""
        Folder(self.folder).keep(Run(self.draw, self.mode, self.criterion, history))
        what = f"{self.settings.name}, draw {self.draw}, {self.mode}, {self.criterion}"
        return f"{what}: {seconds:.0f} s, {len(history) - 1} steps, {outcome}"


def unfinished(
    settings: S, out: Path, criteria: Sequence[str], modes: Sequence[str], draws: int | range, device: str
) -> tuple[Folder, list[Task[S]]]:
    """The folder of an experiment, and every run that is not in it yet."""
    wrong = [mode for mode in modes if mode not in MODES]
    if wrong:
        raise SecateurError(f"the mode {wrong[0]!r} is not known.", fix=f"use {' or '.join(MODES)}")
    folder = Folder(out / settings.name)
    folder.claim(settings.recorded())
    _note_machine(folder.path, device)
    tasks = [
        Task(settings, folder.path, draw, mode, criterion, device)
        for draw in (range(draws) if isinstance(draws, int) else draws)
        for mode in modes
        for criterion in criteria
        if not folder.place(draw, mode, criterion).exists()
    ]
    return folder, tasks


def _note_machine(folder: Path, device: str) -> None:
    """Write down what computes the runs of a folder."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    found = {"device": name, "torch": torch.__version__, "python": platform.python_version()}
    write(folder / "machine.json", json.dumps(found, indent=1).encode())


def spread(work: Callable[[Task[S]], str], tasks: Sequence[Task[S]], jobs: int, report: Report) -> None:
    """Do every task, `jobs` at a time in separate processes. If one fails, finished ones are kept."""
    if jobs <= 1 or len(tasks) <= 1:
        for task in tasks:
            report(work(task))
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with Pool(min(jobs, len(tasks)), threads) as pool:
        pool.results([(work, (task,)) for task in tasks], report)
