"""After every run: does the smaller model keep its reasons? Heat maps of a few samples, for a small share of the work.

How many samples that are follows from what the run did, counted in forward passes, not from a clock: the same call
looks at the same samples. The samples of `watch` are always looked at.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from secateur.analysis.reasons import Drift, drift, maskable, some_of, warn_of_other_reasons
from secateur.loop.settings import Settings, is_example
from secateur.repair.samples import FEW_TOKENS
from secateur.repair.session import Repair
from secateur.results.history import Record
from secateur.running.batches import Data, total_of
from secateur.running.processes import is_first, same_everywhere
from secateur.running.targets import ids_in

Made = TypeVar("Made", bound=Record)

#: Of the work of the run.
_SHARE = 0.05
# Forward passes: of analysis and verification; of each sample that units are scored on (the least that a criterion
# with a backward pass takes), and that joins a repair.
_ANALYSIS, _SCORING, _REPAIR = 60, 3, 5
# Forward passes of each sample that is looked at: two heat maps; and the SRG of both.
_MAPS, _FAITHFUL = 9, 12
_FEWEST, _MOST = 2, 32


def with_reasons(result: Made, data: Data, settings: Settings) -> Made:
    """The result, with its drift. Warns if it is as accurate as before, but for other reasons."""
    if result.plan is None or result.original is None:
        return result
    found: Any = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _measured(result, data, settings)
    except Exception as error:  # the run succeeded, whatever its samples look like
        found = f"not measured: {error}"
    found = same_everywhere(found)
    if found is None or isinstance(found, str):
        return replace(result, settings={**result.settings, "reasons": found}) if found else result
    assert isinstance(found, Drift)
    kept = [row.overall for row in result.history if row.held and row.overall is not None]
    if is_first() and (not kept or found.stayed(kept[0], kept[-1])):
        warn_of_other_reasons(found)
    return replace(result, reasons=found)


def _measured(result: Record, data: Data, settings: Settings) -> Drift | None:
    assert result.original is not None
    if settings.watch is not None:
        samples, faithful = (settings.watch[0], settings.watch[1]), True
    else:
        passes = _SHARE * _passes(result, data, settings)
        count = min(int(passes // _MAPS), _MOST)
        if count < _FEWEST or is_example(data):
            return None
        samples, fewer = some_of(data, count), min(int(passes // (_MAPS + _FAITHFUL)), _MOST)
        faithful = _covers(samples[0]) and fewer >= max(_FEWEST, _classes(samples[1]))
        if faithful:
            samples = some_of(data, fewer)
    return drift(result.original, result.model, samples, samples=None, faithful=faithful)


def _covers(inputs: Any) -> bool:
    """Whether parts of these inputs can be covered, which an SRG needs."""
    return maskable(inputs) or (isinstance(inputs, Tensor) and inputs.dim() == 4)


def _classes(targets: Any) -> int:
    return len(set(targets.tolist())) if isinstance(targets, Tensor) and targets.dim() == 1 else 1


def _passes(result: Record, data: Data, settings: Settings) -> int:
    """How many forward passes of one sample the run took, at least."""
    steps, total = len(result.history) - 1, total_of(data) or 0
    passes = _ANALYSIS
    if settings.criterion.data is not False:
        passes += _SCORING * total * (steps if settings.schedule.rescore else 1)
    if isinstance(settings.repair, Repair):
        ids = ids_in(result.graph.example)
        copies = settings.repair.copies if ids is None or total * ids[0].numel() <= FEW_TOKENS else 0
        passes += _REPAIR * steps * min((1 + copies) * total, settings.repair.samples)
    return passes
