"""Everything that can go wrong, by name. Each error says what is wrong, where, and how to fix it.

Messages are data. Python shows an error by `str(error)`, the command line by `error.render(…)`, which spells the
arguments of our functions as options. Nobody has to search in a text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """An argument that a message mentions, with its value unless that is left out. `key` is for one entry of a dict.

    >>> print(Argument("remove", 0.9), Argument("round_to"), Argument("keep", 0.5, key="macs"))
    remove=0.9 round_to keep={'macs': 0.5}
    """

    name: str
    value: object = ...
    key: str = ""

    @property
    def given(self) -> bool:
        """Whether the value is part of the message."""
        return self.value is not ...

    def __str__(self) -> str:
        if self.key:
            return f"{self.name}={{{self.key!r}: {self.value!r}}}" if self.given else f"{self.name}[{self.key!r}]"
        return f"{self.name}={self.value!r}" if self.given else self.name


class Message(Exception):
    """What errors and warnings have in common: `what` is wrong, `where`, the wrong `value`, and how to `fix` it.

    `what` and `fix` are plain texts. If `named` values are given, both are templates for `str.format`. The first
    `Argument` among the values is `where`, unless that is given.

    >>> error = Message("{remove} is no share.", fix="{remove} / 100", remove=Argument("remove", 50))
    >>> print(error, error.where, error.value)
    remove=50 is no share. Fix: remove=50 / 100. remove 50
    >>> print(error.render(lambda argument: f"--{argument.name} {argument.value}"))
    --remove 50 is no share. Fix: --remove 50 / 100.
    """

    def __init__(self, what: str, *, where: object = "", value: object = None, fix: str = "", **named: object) -> None:
        super().__init__(what)
        first = next((item for item in named.values() if isinstance(item, Argument)), None)
        if first is not None and not where:
            where, value = first.name, first.value if first.given else value
        self.where, self.value = str(where), value
        self._texts, self._named = (what, fix), named

    @property
    def what(self) -> str:
        """What is wrong."""
        return self._filled(str)[0]

    @property
    def fix(self) -> str:
        """What to do; empty where nothing helps in general."""
        return self._filled(str)[1]

    def render(self, spell: Callable[[Argument], str] = str) -> str:
        """The whole message; `spell` says how an argument is written."""
        what, fix = self._filled(spell)
        if not fix:
            return what
        return f"{what}{'' if what.endswith(_ENDS) else '.'} Fix: {fix}{'' if fix.endswith(_ENDS) else '.'}"

    def _filled(self, spell: Callable[[Argument], str]) -> list[str]:
        if not self._named:  # a plain text may hold braces
            return list(self._texts)
        words = {name: spell(item) if isinstance(item, Argument) else item for name, item in self._named.items()}
        return [text.format(**words) for text in self._texts]

    def __str__(self) -> str:
        return self.render()


_ENDS = (".", "…", "?", "!")


def printable(text: str) -> str:
    r"""The text with control characters spelled out: those in the name of a file must not reach a terminal.

    >>> print(printable("a\x1b[2J b\u202e"))
    a\x1b[2J b\u202e
    """
    odd = {c for c in text if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs")}
    return text.translate({ord(c): c.encode("unicode_escape").decode() for c in odd}) if odd else text


class SecateurError(Message):
    """Parent of every error that secateur raises on purpose. `result` is what a pruning loop had completed by then.

    >>> print(SecateurError("there is no data.", fix="give data=(inputs, targets)"))
    there is no data. Fix: give data=(inputs, targets).
    """

    result: object = None


class UnknownOperationError(SecateurError):
    """The model calls a function that the table of operations has no entry for."""


class UnsupportedModelError(SecateurError):
    """The model has a part that secateur understands but cannot prune or explain."""


class ModelError(SecateurError):
    """There is no model of that name, or it cannot be built."""


class ForwardError(SecateurError):
    """The model does not run on the example input."""


class NothingToPruneError(SecateurError):
    """The model has no unit that may be removed."""


class TargetError(SecateurError):
    """The asked-for size cannot be reached, or the target makes no sense."""


class PlanError(SecateurError):
    """A plan does not fit the model it is applied to."""


class VerificationError(SecateurError):
    """Removal and zero-masking disagree: the smaller model is withheld. `layers` are those at fault, if known."""

    layers: tuple[str, ...] = ()


class FileFormatError(SecateurError):
    """A file is damaged, foreign, or belongs to another model."""


class DataError(SecateurError):
    """The data handed in are empty, of the wrong shape, or not finite."""


class CriterionError(SecateurError):
    """A criterion is not known, failed, or returned something that is no score."""


class NotFiniteError(SecateurError):
    """The model's own weights hold NaN or infinity, or its buffers hold NaN."""


class LoopError(SecateurError):
    """The pruning loop was stopped by something outside it. `result` holds the last step that was completed."""

    def __str__(self) -> str:
        kept = " What was completed is in `error.result`." if self.result is not None else ""
        return f"{self.render()}{kept}"


class EvaluationError(LoopError):
    """The user's `evaluate`, `finetune` or `repair` raised."""


class TrainingError(LoopError):
    """Training was stopped: the loss is not finite, or a batch does not fit into memory.

    `fits` is the number of samples that do, if it is known.
    """

    fits: int | None = None


class CheckpointError(LoopError):
    """A checkpoint could not be written; the one before it is intact."""


class ProcessError(SecateurError):
    """Of several processes, another one failed or has another model."""


class RepairError(SecateurError):
    """A smaller model does not belong to the original that it should be repaired by, or cannot be repaired."""


class RelevanceError(SecateurError):
    """Relevance became NaN or infinite, or cannot be computed."""


class SecateurWarning(Message, UserWarning):
    """Parent of every warning that secateur gives."""


class ConservationWarning(SecateurWarning):
    """A layer loses or creates relevance."""
