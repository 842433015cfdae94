"""How the user's functions are called: with fixed random numbers, and with their name on whatever they raise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from secateur.errors import EvaluationError, SecateurError
from secateur.running.batches import Data
from secateur.running.processes import same_everywhere
from secateur.running.sandbox import evaluating

#: `f(model)` returns an accuracy, or a dict with "overall" and a number per class.
Evaluate = Callable[[nn.Module], float | Mapping[str, float]]
#: `f(small, original, data)` returns a corrected module of the same shapes.
Repairer = Callable[[nn.Module, nn.Module, Data], nn.Module]


def evaluated(evaluate: Evaluate, model: nn.Module, step: int, seed: int) -> dict[str, float]:
    """What `evaluate` says about the model in evaluation mode."""
    with seeded(seed, step, salt=2), named("evaluate", step), evaluating(model), torch.no_grad():
        found = evaluate(model)
        items = found.items() if isinstance(found, Mapping) else [("overall", found)]
        metrics = {str(key): float(value) for key, value in items}
        if "overall" not in metrics or not np.isfinite(list(metrics.values())).all():
            raise ValueError(f"it returned {found!r}: a finite number, or a dict with 'overall', is needed")
    return dict(same_everywhere(metrics))


def within(drop: float | Mapping[str, float], before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Whether no metric fell by more than `drop` allows. "worst" stands for every class."""
    limits = drop if isinstance(drop, Mapping) else {"overall": drop}
    for key, limit in limits.items():
        names = [name for name in before if name != "overall"] if key == "worst" else [key]
        for name in names:
            if name not in before:
                raise EvaluationError(f"max_drop names {name!r}, but evaluate returns {', '.join(before)}.")
            if before[name] - after.get(name, -np.inf) > limit + 1e-12:
                return False
    return True


@contextmanager
def named(what: str, step: int) -> Iterator[None]:
    """Put the name of the user's function on whatever it raises."""
    try:
        yield
    except SecateurError:
        raise
    except Exception as error:
        raise EvaluationError(f"{what} raised {type(error).__name__} at step {step}: {error}.") from error


@contextmanager
def seeded(seed: int, step: int, salt: int = 0) -> Iterator[None]:
    """Random numbers that depend on seed and step alone, so that a resumed run draws the same; the user's are kept."""
    ready = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if ready else []
    python, numpy = random.getstate(), np.random.get_state()
    key = int(np.random.SeedSequence([seed % 2**32, step, salt]).generate_state(1)[0])
    with torch.random.fork_rng(devices):
        torch.manual_seed(key)
        random.seed(key)
        np.random.seed(key)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
