"""How the learning rate moves over a training run, and when the run is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from secateur.running.processes import same_everywhere

#: For a share of the run that is done, the share of the learning rate.
Curve = Callable[[float], float]

# Those of torch's OneCycleLR: how long the rate rises, where it begins, and where it ends.
_RISE, _FIRST, _LAST = 0.3, 1 / 25, 1 / 25e4


def constant(done: float) -> float:
    """The learning rate as it is."""
    return 1.0


def cosine(done: float) -> float:
    """From the learning rate down to 0 along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def onecycle(done: float) -> float:
    """Up from 1/25 over the first 30 %, then down to almost 0; both along half a cosine."""
    if done < _RISE:
        return 1 + (_FIRST - 1) * cosine(done / _RISE)
    return _LAST + (1 - _LAST) * cosine((done - _RISE) / (1 - _RISE))


CURVES: dict[str, Curve] = {"cosine": cosine, "onecycle": onecycle, "constant": constant}


@dataclass
class Budget:
    """How much of a run is done: of its epochs, or of its minutes, whichever is further.

    Time that an interrupted run used counts. `used` are its seconds.
    """

    epochs: int | None
    minutes: float | None
    used: float = 0.0
    _begin: float = field(default_factory=lambda: time.perf_counter())

    @property
    def seconds(self) -> float:
        """How long the run takes so far, interruptions left out."""
        return self.used + time.perf_counter() - self._begin

    def done(self, epochs: float) -> float:
        """The share that is done after so many epochs. In several processes the first one's clock counts."""
        share = epochs / self.epochs if self.epochs else 0.0
        if self.minutes is not None:
            share = max(share, float(same_everywhere(self.seconds / (60 * self.minutes))))
        return min(share, 1.0)
