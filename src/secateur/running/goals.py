"""What counts in a model's answer where that is no class: boxes, pixels, quantities, embeddings, the next token.

A goal says how much of the right answer a model gives, one number per sample. Relevance starts there, and gradients are
those of its loss. A function `f(output, targets)` of your own does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import Argument, DataError
from secateur.nest import describe, map_tensors, tensors_in
from secateur.running.logits import answer_of, logits_of
from secateur.running.targets import IGNORED, check_targets

#: Of one sample: boxes (count, 4), scores, one per box or one per box and class, and labels in the first case.
Found = tuple[Tensor, Tensor, Tensor | None]


class Matched(NamedTuple):
    """The boxes of a sample that count, as numbers of the output and by their corners, their scores, what they should
    be, how much each counts, and how sure the model is of it."""

    numbers: Tensor
    boxes: Tensor
    scores: Tensor
    wanted: Tensor
    share: Tensor
    sure: Tensor


class Tapped(NamedTuple):
    """What a model returns, and what some of its modules do."""

    output: Any
    inner: list[Any]


@dataclass(frozen=True)
class Goal:
    """A number per sample, from all that the model returns and the targets (None if they are not known)."""

    #: Whether relevance starts with what each number of the output adds to the value, whatever the composite says.
    by_value: ClassVar[bool] = False

    def value(self, output: Any, targets: Any) -> Tensor:
        """How much of its answer the model gives for each sample. Relevance starts here."""
        raise NotImplementedError

    def loss(self, output: Any, targets: Any) -> Tensor:
        """A mean over samples, for gradients: by default what is lost of the value."""
        return -self.value(output, targets).mean()

    def taps(self, model: nn.Module) -> Sequence[str]:
        """Paths of modules whose answers count beside the model's own: then `output` is `Tapped`."""
        return ()


@dataclass(frozen=True)
class Segmentation(Goal):
    """A class for each pixel: the mean logit of the true class, or of the predicted one without targets.

    The output has the shape (samples, classes, height, width), with one class for "yes" against "no". It may be
    smaller than the masks, (samples, height, width); `ignored` pixels have no class.
    """

    ignored: int = 255

    def value(self, output: Any, targets: Any) -> Tensor:
        logits, classes, counts = self._pixels(output, targets)
        if logits.shape[1] == 1:
            chosen = torch.where(classes > 0, logits[:, 0], -logits[:, 0])
        else:
            chosen = logits.gather(1, classes[:, None])[:, 0]
        return _mean(chosen, counts)

    def loss(self, output: Any, targets: Any) -> Tensor:
        logits, classes, counts = self._pixels(output, targets)
        if logits.shape[1] == 1:
            losses = F.binary_cross_entropy_with_logits(logits[:, 0], classes.to(logits.dtype), reduction="none")
        else:
            losses = F.cross_entropy(logits, classes, reduction="none")
        return _mean(losses, counts).mean()

    def _pixels(self, output: Any, targets: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Logits as large as the masks, the class of each pixel, and whether it counts."""
        logits = logits_of(output, warn=False)
        if logits.ndim < 4:
            raise _misfit("Segmentation", logits, targets, "(samples, classes, height, width)")
        if targets is None:
            classes = (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(1)
            return logits, classes, torch.ones_like(classes, dtype=torch.bool)
        masks = torch.as_tensor(targets, device=logits.device)
        if masks.ndim == logits.ndim and masks.shape[1] == 1:
            masks = masks[:, 0]
        if masks.ndim != logits.ndim - 1 or len(masks) != len(logits):
            raise _misfit("Segmentation", logits, targets, "masks of shape (samples, height, width)")
        if masks.shape[1:] != logits.shape[2:]:
            mode = "bilinear" if logits.ndim == 4 else "trilinear"
            logits = F.interpolate(logits, tuple(masks.shape[1:]), mode=mode, align_corners=False)
        if masks.is_floating_point() and bool((masks != masks.round()).any()):
            raise DataError("masks hold real numbers, not classes.", fix="whole class numbers, e.g. masks > 0.5")
        counts = (masks != self.ignored) & (masks != IGNORED)
        classes = torch.where(counts, masks, 0).long()
        most = max(logits.shape[1], 2)
        if int(classes.min()) < 0 or int(classes.max()) >= most:
            raise DataError(
                f"masks hold classes from {int(classes.min())} to {int(classes.max())}, but the model has "
                f"{logits.shape[1]} outputs for each pixel.",
                fix="number the classes as the outputs are; Segmentation(ignored=…) names what is no class",
            )
        return logits, classes, counts


@dataclass(frozen=True)
class Regression(Goal):
    """Quantities, such as depths, flows or images: the sum of what the model answers, and its squared error."""

    by_value: ClassVar[bool] = True

    def value(self, output: Any, targets: Any) -> Tensor:
        return _rows(logits_of(output, warn=False)).sum(1)

    def loss(self, output: Any, targets: Any) -> Tensor:
        answer = logits_of(output, warn=False)
        if targets is None:
            return super().loss(output, targets)
        wanted = torch.as_tensor(targets, device=answer.device, dtype=answer.dtype)
        # (samples,) and (samples, 1) are the same; other orders of as many numbers are not.
        if [n for n in wanted.shape if n > 1] != [n for n in answer.shape if n > 1]:
            raise _misfit("Regression", answer, targets, "targets shaped like the output")
        return F.mse_loss(answer, wanted.reshape(answer.shape))


@dataclass(frozen=True)
class Similarity(Goal):
    """Embeddings: the cosine of what the model answers and the targets, or without any what it answers itself.

    Lengths are taken as given, so that the value is a sum over the numbers of the embedding. Answers for positions are
    averaged over them: `Similarity(pool=False)` compares them one by one.
    """

    by_value: ClassVar[bool] = True

    pool: bool = True

    def value(self, output: Any, targets: Any) -> Tensor:
        answer = logits_of(output, warn=False)
        wanted = answer.detach() if targets is None else torch.as_tensor(targets).to(answer)
        if self.pool:
            answer, wanted = (t.flatten(1, -2).mean(1) if t.ndim > 2 else t for t in (answer, wanted))
        if answer.shape != wanted.shape or answer.ndim < 2:
            raise _misfit("Similarity", answer, targets, "(samples, width), or targets of that shape")
        own = answer / answer.detach().norm(dim=-1, keepdim=True).clamp_min(1e-12)
        wanted = F.normalize(wanted, dim=-1)
        return _rows((own * wanted).sum(-1, keepdim=True)).mean(1)


@dataclass(frozen=True)
class NextToken(Goal):
    """The logit of the next token, the mean over a text. `targets` are the tokens themselves, (samples, positions).

    Language models of transformers need no goal: they tell that they generate text.
    """

    def value(self, output: Any, targets: Any) -> Tensor:
        logits, following = self._pairs(output, targets)
        chosen = logits.gather(-1, following.clamp_min(0)[..., None])[..., 0]
        return _mean(chosen, following != IGNORED)

    def loss(self, output: Any, targets: Any) -> Tensor:
        logits, following = self._pairs(output, targets)
        losses = F.cross_entropy(logits.transpose(1, 2), following, reduction="none", ignore_index=IGNORED)
        return _mean(losses, following != IGNORED).mean()

    def _pairs(self, output: Any, targets: Any) -> tuple[Tensor, Tensor]:
        logits = logits_of(output, warn=False)
        known = None if targets is None else torch.as_tensor(targets, device=logits.device)
        if known is None or logits.ndim != 3 or known.shape != logits.shape[:2] or known.is_floating_point():
            raise _misfit("NextToken", logits, targets, "(samples, positions, tokens), with the token ids as targets")
        return logits[:, :-1], check_targets(known[:, 1:], logits[:, :-1].movedim(-1, 1))


@dataclass(frozen=True)
class Detection(Goal):
    """Boxes: the scores and places of those that match a box of the targets: the same class, and an `overlap` of 0.5.

    Targets are a list with a dict for each sample, `boxes` and `labels` (`class_labels`), as the model is trained with.
    Read are what torchvision returns (dicts with `boxes`, `labels` and `scores`), what DETR and its kin of transformers
    return (`logits` and `pred_boxes`), and what YOLO returns: (samples, 4 + classes, boxes). `read(output)` reads
    anything else: for each sample boxes by their corners, scores, and labels or None if scores are by class. Where a
    model returns all its boxes, the one that overlaps most stands for a target that none overlaps enough.

    Each box starts with its score, once at the score and once at its place. `inner` names modules whose numbers only
    choose among places, where no relevance passes: they start as well. Those of torchvision's R-CNNs are known.
    """

    by_value: ClassVar[bool] = True

    overlap: float = 0.5
    read: Callable[[Any], Sequence[Found]] | None = None
    inner: tuple[str, ...] | None = None

    def taps(self, model: nn.Module) -> Sequence[str]:
        known = ("rpn.head", "roi_heads.mask_predictor", "roi_heads.keypoint_predictor")
        paths = {path for path, _ in model.named_modules()}
        return self.inner if self.inner is not None else [path for path in known if path in paths and "rpn" in paths]

    def value(self, output: Any, targets: Any) -> Tensor:
        output, inner = output if isinstance(output, Tapped) else (output, [])
        values = [
            (one.share * one.sure * (_one(one.scores) + _one(one.numbers).mean(1))).sum()
            for one in self._matched(output, targets)
        ]
        chosen = [t for t in tensors_in(inner) if t.is_floating_point() and t.numel()]
        shares = [(t.detach().sigmoid() * _one(t)).sum() / t.detach().sigmoid().sum() for t in chosen]
        return torch.stack(values) + sum(shares, torch.zeros(()).to(values[0])) / len(values)

    def loss(self, output: Any, targets: Any) -> Tensor:
        """What is lost of scores and overlaps. Inner numbers count as they are started with."""
        inner = output.inner if isinstance(output, Tapped) else []
        matched = self._matched(output.output if isinstance(output, Tapped) else output, targets)
        lost = [-(one.share * (one.scores + _overlap(one.boxes, one.wanted))).sum() for one in matched]
        chosen = [t.sigmoid().square().mean() for t in tensors_in(inner) if t.is_floating_point() and t.numel()]
        return torch.stack([*lost, *(-part for part in chosen)]).sum() / len(lost)

    def _matched(self, output: Any, targets: Any) -> list[Matched]:
        """For each sample the boxes that count."""
        found, centred, asked = ([*self.read(output)], False, False) if self.read is not None else boxes_in(output)
        if targets is None:
            return [_said(*one, centred) for one in found]
        if not are_boxes(targets) or len(targets) != len(found):
            count = len(targets) if isinstance(targets, list | tuple) else describe(targets)
            raise DataError(
                f"targets for {len(found)} samples are {count}, and not a dict with `boxes` and `labels` for each.",
                fix="[{'boxes': (count, 4), 'labels': (count,)}, …], or None",
            )
        return [self._pairs(*one, dict(known), centred, asked) for one, known in zip(found, targets, strict=True)]

    def _pairs(
        self, numbers: Tensor, scores: Tensor, labels: Tensor | None, known: dict[str, Any], centred: bool, asked: bool
    ) -> Matched:
        """The pairs of boxes and targets of one sample that match."""
        classes = torch.as_tensor(known["class_labels" if "class_labels" in known else "labels"], device=scores.device)
        wanted = torch.as_tensor(known["boxes"]).to(numbers).reshape(-1, 4)
        wanted, boxes = _corners(wanted) if asked else wanted, _corners(numbers) if centred else numbers
        if scores.ndim > 1 and len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < scores.shape[1]:
            raise DataError(
                f"labels run from {int(classes.min())} to {int(classes.max())}, but the model scores {scores.shape[1]} "
                "classes.",
                fix="number the classes from 0, as the outputs are",
            )
        shared = overlaps(wanted, boxes.detach())
        if labels is not None:
            fits = (shared >= self.overlap) & (classes[:, None] == labels)
        else:
            fits = (shared >= self.overlap) | ((shared == shared.amax(1, keepdim=True)) & (shared > 0))
        target, box = fits.nonzero(as_tuple=True)
        place = (box,) if scores.ndim == 1 else (box, classes.long()[target])
        share, sure = 1 / fits.sum(1)[target].to(boxes), _sure(scores)[place]
        return Matched(numbers[box], boxes[box], scores[place], wanted[target], share, sure)


def boxes_in(output: Any) -> tuple[list[Found], bool, bool]:
    """Boxes, scores and labels of each sample, and whether boxes and targets have centres and sizes, not corners."""
    if isinstance(output, list | tuple) and all(isinstance(one, Mapping) and "scores" in one for one in output):
        return [(one["boxes"], one["scores"], one.get("labels")) for one in output], False, False
    logits, boxes = (getattr(output, name, None) for name in ("logits", "pred_boxes"))
    if isinstance(logits, Tensor) and isinstance(boxes, Tensor):
        return [(own, classes, None) for own, classes in zip(boxes, logits, strict=True)], True, True
    first = answer_of(output).tensor if tensors_in(output) else None
    if first is not None and first.ndim == 3 and first.shape[1] > 4:
        return [(own[:4].T, own[4:].T, None) for own in first], True, False
    raise DataError(
        f"the model returns {describe(output)[:200]}, which is no list of boxes that is known.",
        fix="Detection(read=f), where f(output) returns for each sample boxes by their corners, scores, and labels",
    )


def are_boxes(targets: Any) -> bool:
    """Whether targets are a dict with boxes and their labels for each sample."""
    return (
        isinstance(targets, list | tuple)
        and bool(targets)
        and all(isinstance(t, Mapping) and "boxes" in t and ("labels" in t or "class_labels" in t) for t in targets)
    )


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of each box with each other, by their corners."""
    shape = len(first), len(second), 4
    pairs = (boxes.expand(shape).reshape(-1, 4) for boxes in (first[:, None], second[None]))
    return _overlap(*pairs).view(shape[:2])


def _corners(boxes: Tensor) -> Tensor:
    """Corners of boxes that are given by centre and size."""
    centre, half = boxes[:, :2], boxes[:, 2:] / 2
    return torch.cat([centre - half, centre + half], 1)


def _sure(scores: Tensor) -> Tensor:
    """Probabilities from all scores of a sample, which are logits if some are no probability."""
    known = scores.detach()
    return known.sigmoid() if bool(((known < 0) | (known > 1)).any()) else known


def _said(numbers: Tensor, scores: Tensor, labels: Tensor | None, centred: bool) -> Matched:
    """What a model says by itself: all boxes that it returns, or those nearly as sure as the best."""
    sure = _sure(scores)
    if labels is None and scores.ndim > 1:
        sure = sure.amax(1)
        certain = sure >= 0.5 * sure.max()
        numbers, scores, sure = numbers[certain], scores.amax(1)[certain], sure[certain]
    boxes = _corners(numbers) if centred else numbers
    return Matched(numbers, boxes, scores, boxes.detach(), torch.ones_like(sure), sure)


def _one(values: Tensor) -> Tensor:
    """1 everywhere; a number that is twice as large would be 2. What is next to 0 counts as 0."""
    known = values.detach()
    return values * torch.where(known.abs() > 1e-12, 1 / known, 0)


def _overlap(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of pairs of boxes."""
    low, high = torch.maximum(first[:, :2], second[:, :2]), torch.minimum(first[:, 2:], second[:, 2:])
    shared = (high - low).clamp_min(0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp_min(0).prod(-1) for boxes in (first, second)]
    return shared / (areas[0] + areas[1] - shared).clamp_min(1e-12)


def _rows(values: Tensor) -> Tensor:
    return values[:, None] if values.ndim == 1 else values.flatten(1)


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    """For each sample the mean over the positions that count."""
    return _rows(torch.where(counts, values, 0)).sum(1) / _rows(counts).sum(1).clamp_min(1)


def _misfit(goal: str, output: Tensor, targets: Any, expected: str) -> DataError:
    return DataError(
        "{goal} does not fit an output of shape {shape} and targets {targets}.",
        fix="{expected}; or a function f(output, targets) of your own",
        goal=goal, shape=tuple(output.shape), targets=describe(targets), expected=expected,
    )  # fmt: skip


# -- goals of a user -----------------------------------------------------------------------------------------------
#: `f(output, targets)` returns a number (or one per sample), or for relevance what the output starts with.
Aim = Goal | Callable[[Any, Any], Any]


def goal_of(given: Aim | None, targets: Any) -> Aim | None:
    """What counts: what a user gave, boxes if the targets are boxes, or None: classes."""
    return Detection() if given is None and are_boxes(targets) else given


def seen_by(aim: Aim, output: Any) -> Any:
    """The part of an output that a goal gets: all of it. A function gets the tensor that counts."""
    return output if isinstance(aim, Goal) else logits_of(output)


@contextmanager
def tapping(model: nn.Module, aim: Aim | None) -> Iterator[Callable[[Any], Any]]:
    """While a model runs: a function that adds to its output what the taps of a goal saw."""
    inner: list[Any] = []
    paths = aim.taps(model) if isinstance(aim, Goal) else ()
    known = {path for path, _ in model.named_modules()} if paths else set()
    if missing := [path for path in paths if path not in known]:
        raise DataError(f"{type(model).__name__} has no module `{missing[0]}`, whose answers should count.")
    hooks = [model.get_submodule(path).register_forward_hook(lambda m, i, o: inner.append(o)) for path in paths]
    try:
        yield lambda output: Tapped(output, inner) if paths else output
    finally:
        for hook in hooks:
            hook.remove()


def loss_of(aim: Aim, output: Any, targets: Any) -> Tensor:
    """The loss of an output, one number."""
    value = (aim.loss if isinstance(aim, Goal) else aim)(seen_by(aim, output), targets)
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"loss=f(output, targets) returned {describe(value)}; it must be one number, the mean over the samples."
        raise DataError(what, where=Argument("loss"))
    return value.reshape(())


def started(aim: Aim, output: Any, targets: Any, by_value: bool) -> Any:
    """The relevance that a goal starts with, a nest like `output`: what each number of it adds to the value, or with
    `by_value` unset its gradient, which is 1 at a chosen number. A function may return that relevance itself."""
    if not isinstance(aim, Goal):
        with torch.no_grad():
            made = aim(map_tensors(Tensor.detach, output), targets)
        if [t.shape for t in tensors_in(made)] == [t.shape for t in tensors_in(output)]:
            return map_tensors(Tensor.detach, made)
    with torch.enable_grad():
        own = map_tensors(lambda t: t.detach().requires_grad_() if t.is_floating_point() else t, output)
        made = (aim.value if isinstance(aim, Goal) else aim)(own, targets)
    leaves = [t for t in tensors_in(own) if t.requires_grad]
    by_value |= isinstance(aim, Goal) and aim.by_value
    single = isinstance(made, Tensor) and (made.numel() == 1 or isinstance(aim, Goal) or made.shape == own.shape[:1])
    if not single or not made.requires_grad:
        shapes = [tuple(v.shape) if isinstance(v, Tensor) else describe(v)[:200] for v in (made, output)]
        raise DataError(
            f"the starting relevance has shape {shapes[0]}, the output has {shapes[1]}.",
            fix="one number per output; or what counts, one number that depends on the output, or one per sample",
        )
    slopes = iter(torch.autograd.grad(made.sum(), leaves, allow_unused=True))

    def relevance(t: Tensor) -> Tensor:
        slope = next(slopes) if t.requires_grad else None
        return torch.zeros_like(t) if slope is None else (slope * t if by_value else slope).detach()

    return map_tensors(relevance, own)
