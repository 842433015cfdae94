"""Everything that can go wrong, by name. Each error says what is wrong, where, and how to fix it."""

from __future__ import annotations


class SecateurError(Exception):
    """Parent of every error that secateur raises on purpose.

    `what` is wrong, `fix` is how to mend it. `result` is what a pruning loop had completed by then.

    >>> print(SecateurError("there is no data.", fix="give data=(inputs, targets)"))
    there is no data. Fix: give data=(inputs, targets).
    """

    result: object = None

    def __init__(self, what: str, *, fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what} Fix: {self.fix}{'' if self.fix.endswith(('.', '…')) else '.'}" if self.fix else self.what


class UnknownOperationError(SecateurError):
    """The model calls a function that the table of operations has no entry for."""


class UnsupportedModelError(SecateurError):
    """The model has a part that secateur understands but cannot prune or explain."""


class ModelError(SecateurError):
    """There is no model of that name, or it cannot be built."""


class ForwardError(SecateurError):
    """The model does not run on the example input."""


class NothingToPruneError(SecateurError):
    """The model has no unit that may leave."""


class TargetError(SecateurError):
    """The asked-for size cannot be reached, or the target makes no sense."""


class PlanError(SecateurError):
    """A plan does not fit the model it is applied to."""


class VerificationError(SecateurError):
    """Removal and zero-masking disagree: the smaller model is withheld."""


class FileFormatError(SecateurError):
    """A file is damaged, foreign, or belongs to another model."""


class DataError(SecateurError):
    """The data handed in are empty, of the wrong shape, or not finite."""


class CriterionError(SecateurError):
    """A criterion is not known, failed, or returned something that is no score."""


class NotFiniteError(SecateurError):
    """The model's own weights hold NaN or infinity."""


class LoopError(SecateurError):
    """The pruning loop was stopped by something outside it. `result` holds the last step that was completed."""


class EvaluationError(LoopError):
    """The user's `evaluate`, `finetune` or `repair` raised."""


class CheckpointError(LoopError):
    """A checkpoint could not be written; the one before it is intact."""


class RepairError(SecateurError):
    """A smaller model does not belong to the original that it should be repaired by, or cannot be repaired."""


class RelevanceError(SecateurError):
    """Relevance became NaN or infinite, or cannot be computed."""


class SecateurWarning(UserWarning):
    """Parent of every warning that secateur gives."""


class ConservationWarning(SecateurWarning):
    """A layer loses or creates relevance."""
