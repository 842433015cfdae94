"""What commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from secateur.data.views import View
from secateur.errors import SecateurWarning
from secateur.graph.cost import human, measure, time_in_turn

# More classes than this are not all listed.
_CLASSES = 12


@dataclass(frozen=True)
class Footprint:
    """What a model costs: parameters, MACs for one image, seconds for a batch of 1 and of 32 where measured."""

    params: int
    macs: int
    latency_1: float | None = None
    latency_32: float | None = None


def footprints(models: Sequence[nn.Module], view: View, device: torch.device, latency: bool) -> list[Footprint]:
    """Measure models side by side on inputs that are no photographs."""
    one = torch.zeros(1, view.channels, view.size, view.size, device=device)
    costs = [measure(model, one, latency=False) for model in models]
    if not latency:
        return [Footprint(cost.params, cost.macs) for cost in costs]
    many = one.expand(32, -1, -1, -1).contiguous()
    times = zip(costs, time_in_turn(models, one), time_in_turn(models, many), strict=True)
    return [Footprint(cost.params, cost.macs, alone, together) for cost, alone, together in times]


def headline(before: Footprint, after: Footprint, metrics: Sequence[Mapping[str, float]] = ()) -> Table:
    """Before and after, side by side. `metrics` are the accuracies before and after, if there are any."""
    table = Table(title_justify="left")
    for name in ("", "before", "after", "change"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("parameters", human(before.params), human(after.params), _share(after.params, before.params))
    table.add_row("MACs per image", human(before.macs), human(after.macs), _share(after.macs, before.macs))
    for title, a, b in (
        ("latency, batch 1", before.latency_1, after.latency_1),
        ("latency, batch 32", before.latency_32, after.latency_32),
    ):
        if a is not None and b is not None:
            table.add_row(title, f"{1000 * a:.1f} ms", f"{1000 * b:.1f} ms", f"{a / b:.2f}x faster")
    if metrics:
        first, last = metrics[0], metrics[-1]
        classes = [name for name in first if name != "overall"]
        if len(classes) > _CLASSES:  # those that lost most
            classes = sorted(classes, key=lambda name: last[name] - first[name])[:_CLASSES]
        for name in ["overall", *classes]:
            title = "accuracy" if name == "overall" else f"  {name}"
            change = f"{100 * (last[name] - first[name]):+.1f} points"
            table.add_row(title, f"{100 * first[name]:.1f} %", f"{100 * last[name]:.1f} %", change)
    return table


def _share(after: float, before: float) -> str:
    return f"{100 * after / before:.1f} %" if before else "–"


class Talk:
    """Speaks to the user: `result` and `json` on standard output, `stage` on standard error."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        # Wide when it is piped: nobody wraps for a file.
        self.out = Console(width=None if Console().is_terminal else 160, highlight=False, soft_wrap=False)
        self.err = Console(stderr=True, highlight=False)

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Say what is being done, while it is."""
        if self.err.is_terminal:
            with self.err.status(text):
                yield
        else:
            self.note(f"{text} …")
            yield

    def note(self, text: str) -> None:
        """Something worth knowing."""
        self.err.print(text, markup=False)

    def result(self, value: Any) -> None:
        """Print, unless only JSON is wanted."""
        if not self.as_json:
            self.out.print(value, markup=False)

    def json(self, value: Mapping[str, Any]) -> None:
        """Print, if JSON is wanted."""
        if self.as_json:
            print(json.dumps(value, indent=1))


def reported(talk: Talk, evaluate: Callable[[nn.Module], dict[str, float]]) -> Callable[[nn.Module], dict[str, float]]:
    """`evaluate`, with a line for each step where there is no terminal to draw a bar on: logs must not fall silent."""
    if talk.err.is_terminal:
        return evaluate

    def evaluated(model: nn.Module) -> dict[str, float]:
        metrics = evaluate(model)
        params = sum(parameter.numel() for parameter in model.parameters())
        talk.note(f"{human(params)} parameters: accuracy {100 * metrics['overall']:.1f} %")
        return metrics

    return evaluated


@contextmanager
def warnings_as_lines(stream: TextIO, everything: bool) -> Iterator[None]:
    """secateur's warnings as one line each; others, which are for programmers, only when debugging."""
    with warnings.catch_warnings():
        usual = warnings.showwarning
        if not everything:
            warnings.simplefilter("ignore")
        warnings.simplefilter("default", SecateurWarning)

        def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
            if issubclass(category, SecateurWarning):
                print(f"secateur: warning: {' '.join(str(message).split())}", file=stream)
            else:
                usual(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
