"""The loss of a student: what the teacher answers, what the labels say, and how often the student is right."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.arguments import check_number
from secateur.errors import Argument, DataError, EvaluationError, SecateurError, SecateurWarning
from secateur.running.logits import one_output
from secateur.running.targets import IGNORED, Reader, are_shares, default_loss

#: `f(output, targets)` returns a loss.
Loss = Callable[[Tensor, Any], Tensor]


def distillation_loss(
    output: Tensor,
    answer: Tensor,
    targets: Any = None,
    *,
    teacher: float = 0.9,
    temperature: float = 4.0,
    counts: Tensor | None = None,
) -> Tensor:
    """The loss of a student's `output`, given the teacher's `answer` to the same inputs. For your own training loop.

    It is teacher · T² · KL(softmax(answer / T) ‖ softmax(output / T)) + (1 − teacher) · cross-entropy(output, targets),
    with the classes along dimension 1. Without targets, the first part is all. Where there is an answer for each
    position, each sample's loss is the mean over those that `counts` (samples, positions) marks. A model with one
    output has two classes.

    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> distillation_loss(logits, logits), distillation_loss(logits, logits, torch.tensor([0, 1]), teacher=0.5)
    (tensor(0.), tensor(0.1100))
    """
    check_share("teacher", teacher)
    check_number("temperature", temperature, least=1e-6)
    if output.shape != answer.shape:
        raise DataError(
            f"the student answers {tuple(output.shape)}, the teacher {tuple(answer.shape)}: they have other outputs.",
            fix="the original that the student was pruned from; after `specialize`, the specialised one",
        )
    _check_real(output)
    if targets is None:
        teacher = 1.0
    loss = teacher * temperature**2 * _divergence(output, answer.detach(), temperature, counts) if teacher else 0.0
    if teacher < 1:
        loss = loss + (1 - teacher) * default_loss(output, targets)
    assert isinstance(loss, Tensor)
    return loss


def _divergence(output: Tensor, answer: Tensor, temperature: float, counts: Tensor | None) -> Tensor:
    """The mean over samples of KL(answer ‖ output), both softened."""
    student, known = output.float() / temperature, answer.float() / temperature
    if output.ndim < 2 or output.shape[1] == 1:
        student, known = (torch.stack([torch.zeros_like(t), t], 1) for t in (student, known))
    if student.ndim > 2:  # so that classes lie together
        student, known = student.movedim(1, -1), known.movedim(1, -1)
    wanted = F.log_softmax(known, -1)
    each = F.kl_div(F.log_softmax(student, -1), wanted, reduction="none", log_target=True).sum(-1)
    if each.ndim < 2:
        return each.mean()
    each = each.flatten(1)
    if counts is None:
        return each.mean()
    here = counts.to(each.device).flatten(1)
    return (torch.where(here, each, 0).sum(1) / here.sum(1).clamp_min(1)).mean()


def _check_real(output: Tensor) -> None:
    """Refuse complex answers, of which only the real parts would be compared."""
    if output.is_complex():
        raise DataError(
            "the model answers complex numbers, which are no logits.",
            fix="return real ones, such as output.abs(); or your own loss of labels, without a teacher",
        )


def check_share(name: str, value: Any) -> None:
    """Refuse what is no number from 0 to 1."""
    check_number(name, value, least=0)
    if value > 1:
        raise SecateurError("{given} is no share.", fix="a number from 0 to 1", given=Argument(name, value))


def warn_of_quantities(output: Tensor, targets: Any) -> None:
    """Warn if targets are no classes: what a teacher answers is compared as logits of classes."""
    if output.ndim in (0, 1, 3) or output.shape[1] == 1:  # one has two classes; tokens have theirs elsewhere
        return
    real = isinstance(targets, Tensor) and targets.is_floating_point() and targets.shape == output.shape
    if real and not are_shares(targets):
        what = "the targets are no classes, but what the teacher answers is compared as logits of classes."
        warnings.warn(SecateurWarning(what, fix="{none}", none=Argument("teacher", 0)), stacklevel=2)


@dataclass(frozen=True)
class Objective:
    """What a student is trained for. `read` of the same student finds the targets."""

    reader: Reader
    teacher: float
    temperature: float
    loss: Loss | None = None

    def __call__(
        self, inputs: Any, targets: Any, output: Tensor, answer: Tensor | None, check: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The loss, and two numbers: how many answers are right, and how many targets there are; NaN of no classes.

        Checking asks the device for numbers.
        """
        wide = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
        seen = self.reader.read(inputs, targets, wide)
        known = seen.targets
        share = self.teacher if answer is not None else 0.0
        total: Tensor | float = 0.0
        if known is None:
            if answer is None or not share:
                raise DataError(
                    "there are no labels, and no teacher to learn from.", fix="targets, or a {teacher} above 0",
                    teacher=Argument("teacher"),
                )  # fmt: skip
            share = 1.0
        if share and answer is not None:
            theirs = self.reader.view(inputs, targets, answer)
            total = distillation_loss(
                seen.logits, theirs.logits, teacher=1.0, temperature=self.temperature, counts=theirs.counts
            )
            total = share * total
        if share < 1:
            if self.loss is None:
                _check_real(output)
            own = self._given(wide, targets) if self.loss is not None else seen.loss(check=check)
            total = total + (1 - share) * own
        assert isinstance(total, Tensor)
        return total, _hits(seen.logits.detach(), known)

    def _given(self, output: Tensor, targets: Any) -> Tensor:
        """The user's own loss."""
        assert self.loss is not None
        try:
            own = self.loss(output.contiguous(), targets)  # a `view` may ask for the usual order
        except (torch.OutOfMemoryError, SecateurError):
            raise
        except Exception as error:
            raise EvaluationError(f"loss raised {type(error).__name__}: {error}.") from error
        if not isinstance(own, Tensor) or own.numel() != 1:
            shown = f"a tensor of shape {tuple(own.shape)}" if isinstance(own, Tensor) else f"a {type(own).__name__}"
            raise EvaluationError(f"loss returned {shown}.", fix="one number, such as loss.mean()")
        if own.is_complex():
            raise EvaluationError("loss returned a complex number.", fix="a real one, such as loss.abs()")
        return own.reshape(())


def _hits(logits: Tensor, targets: Any) -> Tensor:
    """How many class numbers are right, and how many there are. NaN if targets are no classes, as a loss of the user's
    own may have: so is the sum over all batches, whatever other batches hold."""
    if targets is None:
        return torch.zeros(2, device=logits.device)
    if logits.is_complex():
        return torch.full((2,), math.nan, device=logits.device)
    if isinstance(targets, Tensor) and one_output(logits, targets.numel()) and targets.numel() == logits.numel():
        known = targets.flatten()
        right, there = (logits.flatten() > 0) == (known > 0), known != IGNORED
        # One output tells 1 from 0. Other numbers are quantities. (Asking the device whether there are any would wait.)
        classes = ((known == 0) | (known == 1) | ~there).all()
    elif (
        isinstance(targets, Tensor)
        and logits.ndim > 1
        and logits.shape[1] > 1
        and not targets.is_floating_point()
        and targets.shape == (len(logits), *logits.shape[2:])
    ):
        right, there = logits.argmax(1) == targets, targets != IGNORED
        classes = there.new_ones(())
    else:
        return torch.full((2,), math.nan, device=logits.device)
    return torch.where(classes, torch.stack([(right & there).sum(), there.sum()]).float(), math.nan)
