"""What a run of `prune` ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from secateur.report.document import Page
from secateur.report.page import write_report
from secateur.results.comparison import Comparison
from secateur.results.record import Record
from secateur.running.batches import Data


class Result(Record):
    """What a run ended with. It can write a report about itself."""

    def report(
        self,
        path: str | Path,
        *,
        data: Data = None,
        test: Data = None,
        inputs: tuple[Tensor, Tensor | None] | None = None,
        original: nn.Module | None = None,
        comparison: Comparison | Mapping[str, Result] | None = None,
        classes: Sequence[str] | Mapping[int, str] | None = None,
        page: Page | None = None,
    ) -> Path:
        """Write a page about this run: one HTML file with charts, tables and heat maps that needs nothing else.

        Heat maps before and after are drawn for `inputs`, a pair (x, y), or for a few samples of `data`. If samples of
        `data` cannot be explained (for example because the model has several inputs), the page says why and has no heat
        maps. On `test` the accuracy of both models is measured, also by class. `classes` names the outputs.
        `comparison` (of `compare`, or results by name) adds the curves of several criteria. `original` is the unpruned
        model, if the result does not know it. `page`, a `secateur.report.Page`, holds the title and other details.

        >>> import tempfile, torch, secateur as sc
        >>> net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3))
        >>> data = (torch.rand(16, 4), torch.arange(16) % 3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = sc.prune(net, data, remove=0.5, progress=False).report(folder + "/report.html", test=data)
        ...     page.read_text(encoding="utf-8")[:15]
        '<!doctype html>'
        """
        return write_report(
            path, self, data=data, test=test, inputs=inputs, original=original, comparison=comparison, classes=classes,
            page=page,
        )  # fmt: skip
