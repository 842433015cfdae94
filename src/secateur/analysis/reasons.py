"""Does a smaller model decide for the same reasons? Heat maps of the same samples, before and after.

The drift of a sample is 1 − r, where r is Pearson's correlation of its two heat maps, region by region: 0 if nothing
changed, 1 if the maps have nothing in common. The SRG of a map says how faithful it is to its own model: the mean
probability of the class while the least relevant regions are covered first, minus that while the most relevant ones
are. A map that is no better than chance has 0. Regions of pictures get the mean colour; tokens of texts are masked, so
that nothing attends to them, where the model takes an attention mask.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.arguments import check_count
from secateur.errors import DataError, SecateurWarning
from secateur.nest import select_samples
from secateur.relevance.composites import Composite, composite_named
from secateur.relevance.engine import Start
from secateur.relevance.explain import Explanation, explain, fitting
from secateur.relevance.rules import Rule
from secateur.relevance.starts import How, begun, seed
from secateur.running.batches import Batch, Data, as_data, batches, is_pair, size_of
from secateur.running.copies import named_tensors, shared_copy, unwrap
from secateur.running.devices import device_of, to_device
from secateur.running.logits import logits_of, one_output
from secateur.running.memory import resident, together, trim, trim_beyond
from secateur.running.sandbox import leaves_no_trace, run
from secateur.running.targets import Reader, ids_in

_SIDE = 14  # regions on a side
_TOGETHER = 32  # pictures that run at once
_LEVELS = 3  # shares of the regions that are covered, evenly between none and all
#: Below this correlation two maps have less than a quarter of their variance in common.
OTHER_REASONS = 0.5
#: Up to this loss, the accuracy of a class has stayed.
_STAYED = 0.02
#: A class with fewer samples is told, but not judged alone.
JUDGED = 3
#: With so many samples of which none is right, the targets may be meant in another way.
_DOUBTFUL = 5
#: A class of which less is right has no reasons to keep.
_MOSTLY = 0.5
_WHEN = ("before", "after")


# -- heat maps ---------------------------------------------------------------------------------------------------------
def regional(heat: Tensor) -> Tensor:
    """The relevance of each region, one row per sample: at most 14 by 14 of a picture, else every number."""
    heat = heat.detach().double().cpu()
    if heat.dim() == 3:
        rows, columns = (min(_SIDE, side) for side in heat.shape[1:])
        heat = F.adaptive_avg_pool2d(heat[:, None], (rows, columns))
    return heat.reshape(len(heat), -1)


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's correlation, row by row; 0 where one side is flat, 1 where both are: then nothing changed.

    >>> round(float(correlation(torch.tensor([[0.0, 1, 2]]), torch.tensor([[4.0, 2, 0]]))), 3)
    -1.0
    """
    flat = [x.amax(1) - x.amin(1) <= 1e-12 * x.abs().amax(1) if x.shape[1] else x.new_ones(len(x)) > 0 for x in (a, b)]
    a, b = (x - x.mean(1, keepdim=True) for x in (a, b))
    size = a.norm(dim=1) * b.norm(dim=1)
    found = (a * b).sum(1) / size.clamp_min(torch.finfo(a.dtype).tiny)
    found = torch.where((size > 0) & ~(flat[0] | flat[1]), found.clamp(-1, 1), 0)  # rounding may lead beyond
    return torch.where(flat[0] & flat[1], 1, found)


class Viewer:
    """Explains the same samples with one model after another. `before` is what the original sees.

    Relevance starts at the targets, as in scoring; without any, at the classes that the original predicts.
    """

    def __init__(
        self, original: nn.Module, inputs: tuple[Any, Any], composite: str | Composite | Rule | None = None
    ) -> None:
        x, y = (to_device(part, device_of(original)) for part in inputs)
        self.text = isinstance(x, Mapping) and ids_in(x) is not None
        if not (isinstance(x, Tensor) or self.text) or not size_of(x):
            raise DataError("there is no input to explain: give inputs=(x, y) with at least one sample.")
        self.x, self.y = x, y
        # Of a text, a page names the class. `explain` itself knows where classes start, whichever composite it chooses.
        named = isinstance(y, Tensor) and y.dim() == 1 and not y.is_floating_point() and bool((y >= 0).all())
        start: Any = y
        if not (y is None or self.text or named):
            composite = fitting(original, x) if composite is None else composite
            start = self._begin(original, x, y, composite_named(composite).start)
        self.before = explain(original, x, start, composite=composite)
        self.composite = composite_named(self.before.composite if composite is None else composite)

    def look(self, model: nn.Module) -> Explanation:
        """What another model sees."""
        place = device_of(model)
        x, y, known = (to_device(part, place) for part in (self.x, self.y, self.before.classes))
        start: Any = y
        if not (self.text and y is not None) and (y is not None or known is not None):
            start = self._begin(model, x, y, self.composite.start, known)
        return explain(model, x, start, composite=self.composite, start=self.composite.start)

    def _begin(self, model: nn.Module, x: Any, y: Tensor | None, how: How, classes: Tensor | None = None) -> Start:
        reader = Reader(model)
        if y is not None:
            return lambda output: begun(reader, x, y, output, how, size_of(x))
        return lambda output: seed(reader.view(x, None, output), classes, how)

    def drift(self, heat: Tensor) -> dict[str, float]:
        """How far heat maps of these samples are from those of the original: "overall", and by class number."""
        return _means(1 - self.agreement(heat), self.classes())

    def agreement(self, heat: Tensor) -> Tensor:
        """The correlation with the heat map of the original, sample by sample. Padding of texts does not count."""
        old, new, text = regional(self.before.heat), regional(heat), self.before.text
        if text is None:
            return correlation(old, new)
        rows = zip(old, new, text.counts.cpu(), strict=True)
        return torch.cat([correlation(a[None, counts], b[None, counts]) for a, b, counts in rows])

    def classes(self) -> Tensor | None:
        """The class that is explained for each sample, where that is one."""
        known = self.y if isinstance(self.y, Tensor) and not self.y.is_floating_point() else self.before.classes
        return known.detach().cpu() if known is not None and known.dim() == 1 else None


class Look:
    """What a viewer and then another model saw, with whom that was: heat maps need not be made twice."""

    def __init__(
        self, viewer: Viewer, after: Explanation, models: tuple[nn.Module, nn.Module], composite: Any = None
    ) -> None:
        self.viewer, self.after = viewer, after
        self._models, self._composite, self._state = models, composite, _state(models)

    def shows(self, models: tuple[nn.Module, nn.Module], inputs: tuple[Any, Any], composite: Any) -> bool:
        """Whether the same would be seen: the same models, to which nobody wrote, the same samples and rules."""
        if not all(a is b for a, b in zip(models, self._models, strict=True)) or composite != self._composite:
            return False
        given = to_device(tuple(inputs), device_of(models[0]))
        return _state(models) == self._state and _equal(given, (self.viewer.x, self.viewer.y))


def _state(models: Sequence[nn.Module]) -> list[tuple[Any, ...]]:
    """Of each tensor of some models where it lies, its shape, and sums of its numbers, which show what was written."""
    tensors = [t.detach() for model in models for _, t in named_tensors(model)]
    wide = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in tensors)
    sums = [(t.sum().item(), t.abs().sum().item()) for t in wide]
    return [(t.data_ptr(), tuple(t.shape), *own) for t, own in zip(tensors, sums, strict=True)]


def _equal(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    """Whether two pairs of pictures and classes, or None, are the same. Others are not compared."""
    return all(
        x is y or (isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype == y.dtype and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


def _means(values: Tensor, classes: Tensor | None) -> dict[str, float]:
    found = {"overall": float(values.mean())}
    for number in [] if classes is None else sorted(set(classes.tolist())):
        found[str(number)] = float(values[classes == number].mean())
    return found


def some_of(data: Data, count: int) -> tuple[Any, Tensor | None]:
    """A few samples, as many classes as can be among them: the first of each class, then the second, …"""
    data = as_data(data)
    inputs, targets = data if is_pair(data) else _beginning(data, count)
    text = isinstance(inputs, Mapping) and ids_in(inputs) is not None
    if not isinstance(inputs, Tensor) and not text:
        raise DataError(
            f"heat maps need a tensor of inputs, not {type(inputs).__name__}.",
            fix="leave out data=, or give inputs=(x, y) if the model takes one tensor",
        )
    if not isinstance(targets, Tensor):
        return select_samples(inputs, slice(count)), None if text else targets
    if targets.dim() != 1:
        return select_samples(inputs, slice(count)), targets[:count] if targets.dim() else targets
    index = torch.tensor(sorted(of_every_class(targets.tolist(), count)))
    return select_samples(inputs, index), select_samples(targets, index)


def _beginning(data: Data, count: int) -> Batch:
    """So many samples, or the first batch where that cannot be joined with the next."""
    taken: list[list[Any]] = []
    for inputs, targets in batches(data):
        parts = [inputs] if targets is None else [inputs, targets]
        joins = all(isinstance(part, Tensor) and part.dim() for part in parts)
        if taken and not (joins and [t.shape[1:] for t in parts] == [t.shape[1:] for t in taken[0]]):
            break
        taken.append(parts)
        if not joins or sum(len(x) for x, *_ in taken) >= count:
            break
    columns = [torch.cat(column) if len(taken) > 1 else column[0] for column in zip(*taken, strict=True)]
    return (*columns, None, None)[0], (*columns, None, None)[1]


def of_every_class(classes: Sequence[int], count: int) -> list[int]:
    """Places of a few samples: the first of each class, then the second, …

    >>> of_every_class([0, 0, 0, 1, 2], 4)
    [0, 3, 4, 1]
    """
    seen: Counter[int] = Counter()
    order = []
    for place, number in enumerate(classes):
        order.append((seen[number], place))
        seen[number] += 1
    return [place for _, place in sorted(order)[:count]]


# -- faithfulness ------------------------------------------------------------------------------------------------------
def probability(logits: Tensor, classes: Tensor) -> Tensor:
    """The probability of a class, one per sample. One output is that of class 1."""
    logits = logits.detach().double().cpu()
    if one_output(logits, len(classes)):
        yes = logits.reshape(len(classes)).sigmoid()
        return torch.where(classes > 0, yes, 1 - yes)
    return logits.softmax(1).gather(1, classes[:, None])[:, 0]


def srg(model: nn.Module, x: Tensor, heat: Tensor, classes: Tensor) -> Tensor:
    """The SRG of the heat maps of pictures (N, C, H, W), one number each. Covered regions have the mean colour."""
    rows, columns = (min(_SIDE, side) for side in x.shape[2:])
    ranks = regional(heat).argsort(1).argsort(1).view(len(x), 1, rows, columns)  # 0 is the least relevant
    model, blank = shared_copy(unwrap(model)).eval(), x.mean((2, 3), keepdim=True)
    counts = [round(rows * columns * level / (_LEVELS + 1)) for level in range(1, _LEVELS + 1)]
    masks = [(1, ranks < count) for count in counts] + [(-1, ranks >= rows * columns - count) for count in counts]
    trim()  # of what heat maps took
    total, most, held = torch.zeros(len(x), dtype=torch.float64), together(model, x), resident()
    # Few pictures run together: a small network takes longer to call than to run.
    step = max(1, min(_TOGETHER, most) // len(x))
    for begin in range(0, len(masks), step):
        part = masks[begin : begin + step]
        covered = torch.cat([torch.where(F.interpolate(mask.to(x), x.shape[2:]) > 0, blank, x) for _, mask in part])
        with torch.no_grad():
            logits = torch.cat([logits_of(run(model, few)) for few in torch.split(covered, most)])
        held = trim_beyond(held)
        found = probability(logits, classes.repeat(len(part))).view(len(part), len(x))
        total += found.mT @ torch.tensor([sign for sign, _ in part], dtype=found.dtype)
    return total / (_LEVELS + 1)


def maskable(inputs: Any) -> bool:
    """Whether single tokens of these texts can be masked: there is an attention mask, a number for each of them."""
    ids = ids_in(inputs) if isinstance(inputs, Mapping) else None
    mask = inputs.get("attention_mask") if ids is not None else None
    return ids is not None and isinstance(mask, Tensor) and mask.shape == ids.shape


def srg_of_texts(model: nn.Module, inputs: Mapping[str, Any], heat: Tensor, counts: Tensor, classes: Tensor) -> Tensor:
    """The SRG of the relevance of tokens (N, T), one number per text. `counts` says which tokens belong to it; one of
    them always stays."""
    mask, counts = inputs["attention_mask"], counts.cpu()
    model, sizes = shared_copy(unwrap(model)).eval(), counts.sum(1, keepdim=True)
    ranks = torch.where(counts, heat.detach().double().cpu(), torch.inf).argsort(1).argsort(1)
    total = torch.zeros(len(mask), dtype=torch.float64)
    for level in range(1, _LEVELS + 1):
        share = (sizes * level / (_LEVELS + 1)).round().minimum(sizes - 1)
        for sign, hidden in ((1, ranks < share), (-1, (ranks >= sizes - share) & (ranks < sizes))):
            covered = {**inputs, "attention_mask": mask.masked_fill(hidden.to(mask.device), 0)}
            with torch.no_grad():
                total += sign * probability(logits_of(run(model, covered)), classes)
    return total / (_LEVELS + 1)


# -- before and after --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, repr=False)
class Drift:
    """How far the reasons of a smaller model are from those of the original, on some samples.

    `agreement` has the correlation of both heat maps of each sample; `classes` what was explained; `srg` how faithful
    both maps are to their own models, where the samples are pictures, or texts with an attention mask; `right` whether
    both models answer that class.
    `float(…)` is the drift: 1 minus the mean correlation.
    """

    agreement: Tensor
    classes: Tensor | None = None
    srg: tuple[Tensor, Tensor] | None = None
    right: tuple[Tensor, Tensor] | None = None
    heat: tuple[Tensor, Tensor] | None = field(default=None, compare=False)
    #: How it was seen; not in copies and in other processes.
    look: Look | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"look": None}

    def __float__(self) -> float:
        return 1 - float(self.agreement.mean())

    @property
    def by_class(self) -> dict[int, float]:
        """The drift of each class."""
        means = _means(1 - self.agreement, self.classes)
        return {int(name): value for name, value in means.items() if name != "overall"}

    @property
    def other_reasons(self) -> list[int]:
        """Classes that are answered as well as before, for other reasons: the correlation of their maps is below 0.5.
        A class needs three samples. If none has three, or there are no classes, all samples together are class -1."""
        return self.doubtful()

    def doubtful(self, least: int = JUDGED) -> list[int]:
        """`other_reasons` of classes that have so many samples; if none has, of all samples together."""
        found = {number: drift for number, drift in self.by_class.items() if int(self.of_class(number).sum()) >= least}
        found = found or ({-1: float(self)} if len(self.agreement) >= least else {})
        return [number for number, drift in found.items() if 1 - drift < OTHER_REASONS and self._stays(number)]

    def _stays(self, number: int) -> bool:
        if self.right is None:
            return True
        before, after = (values[self.of_class(number)].double().mean() for values in self.right)
        return bool(before >= _MOSTLY) and self.stayed(float(before), float(after))

    @staticmethod
    def stayed(before: float, after: float) -> bool:
        """Whether an accuracy is as good as before: at most two points are lost."""
        return after >= before - _STAYED

    def of(self, before: Explanation, after: Explanation) -> bool:
        """Whether these are the heat maps that were compared, and nothing of them is left to measure."""
        maps = [seen.heat.detach().cpu() for seen in (before, after)]
        whole = self.srg is not None or before.text is not None
        return whole and self.heat is not None and all(map(torch.equal, self.heat, maps))

    def of_class(self, number: int) -> Tensor:
        """Which samples are of a class; -1 stands for all."""
        whole = torch.ones_like(self.agreement, dtype=torch.bool)
        return whole if self.classes is None or number < 0 else torch.eq(self.classes, number)

    def summary(self, name: Callable[[int], str] = str, most: int = 3) -> str:
        """In a line: the drift, of all samples and of the classes that moved most, and the SRG before and after."""
        worst = sorted(self.by_class.items(), key=lambda item: -item[1])[:most]
        classes = f" ({', '.join(f'{name(number)} {drift:.2f}' for number, drift in worst)})" if len(worst) > 1 else ""
        faithful = "" if self.srg is None else "; SRG " + " → ".join(f"{float(s.mean()):.2f}" for s in self.srg)
        other = ["all together" if number < 0 else name(number) for number in self.other_reasons]
        told = f"; right for other reasons: {', '.join(other)}" if other else ""
        if self.right is not None and len(self.agreement) >= _DOUBTFUL and not self.right[0].any():
            told += "; the unpruned model is right on none of them: are targets numbered as its outputs are?"
        return f"drift of the heat maps of {len(self.agreement)} samples: {float(self):.2f}{classes}{faithful}{told}"

    def to_dict(self, name: Callable[[int], str] = str) -> dict[str, Any]:
        """Plain values, for JSON."""
        srg = None if self.srg is None else {when: float(s.mean()) for when, s in zip(_WHEN, self.srg, strict=True)}
        return {
            "samples": len(self.agreement), "drift": float(self), "srg": srg,
            "by_class": {name(number): drift for number, drift in self.by_class.items()},
            "samples_by_class": {name(number): int(self.of_class(number).sum()) for number in self.by_class},
            "srg_by_class": None if self.srg is None else {
                name(number): {w: float(s[self.of_class(number)].mean()) for w, s in zip(_WHEN, self.srg, strict=True)}
                for number in self.by_class
            },
            "other_reasons": ["all" if number < 0 else name(number) for number in self.other_reasons],
        }  # fmt: skip

    def __repr__(self) -> str:
        faithful = "" if self.srg is None else "; SRG " + " → ".join(f"{float(s.mean()):.3f}" for s in self.srg)
        return f"<Drift {float(self):.3f} on {len(self.agreement)} samples{faithful}>"

    def note(self, number: int) -> str:
        """What is to be said of a class: that its reasons changed, or that it has too few samples to say so."""
        if number in self.other_reasons:
            return "right for other reasons"
        few = number >= 0 and number in self.doubtful(least=1)
        return "looks elsewhere, too few samples to judge" if few else ""

    def table(self, name: Callable[[int], str] = str) -> str:
        """All samples and each class of theirs: how many there are, the drift, and the SRG before and after."""
        rows = {number: "all" if number < 0 else name(number) for number in (-1, *self.by_class)}
        wide = max(8, *map(len, rows.values()))
        lines = [f"{'class':>{wide}}  samples  drift" + ("" if self.srg is None else "  SRG before   SRG after")]
        for number, drift in {-1: float(self), **self.by_class}.items():
            mine = self.of_class(number)
            line = f"{rows[number]:>{wide}}  {int(mine.sum()):7d}  {drift:5.3f}"
            line += "" if self.srg is None else "".join(f"  {float(s[mine].mean()):10.3f}" for s in self.srg)
            lines.append(f"{line}  {self.note(number)}".rstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def warn_of_other_reasons(found: Drift, name: Callable[[int], str] = str) -> None:
    """Warn of classes that are as accurate as before, but for other reasons, if they have enough samples."""
    if numbers := found.other_reasons:
        names = ", ".join("all samples" if number < 0 else f"class {name(number)}" for number in numbers)
        what = f"right for other reasons: {names}. The accuracy stays, but heat maps before and after correlate by less"
        fix = "look at these samples in the report; keep more units, or give max_drift"
        warnings.warn(SecateurWarning(f"{what} than {OTHER_REASONS}.", fix=fix), stacklevel=4)


@leaves_no_trace
def drift(
    original: nn.Module,
    small: nn.Module,
    data: Data,
    *,
    samples: int | None = 32,
    composite: str | Composite | Rule | None = None,
    faithful: bool = True,
) -> Drift:
    """Compare the heat maps of two models on the first `samples` of the data, all classes among them if possible.

    `samples=None` takes the data as they are, a pair (inputs, targets).
    Without `faithful` there is no SRG, which takes six forward passes per sample and model.

    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> drift(net, net, (torch.rand(6, 4), torch.arange(6) % 3))
    <Drift 0.000 on 6 samples>
    """
    if samples is not None:
        check_count("samples", samples)
    chosen: Any = data if samples is None else some_of(data, samples)
    viewer = Viewer(unwrap(original), chosen, composite)
    models = unwrap(original), unwrap(small)
    look = Look(viewer, viewer.look(small), models, composite)
    return replace(compared(viewer, *models, look.after, faithful), look=look)


def compared(viewer: Viewer, original: nn.Module, small: nn.Module, after: Explanation, faithful: bool) -> Drift:
    """The drift from what a viewer saw first to what another model sees."""
    before, classes = viewer.before, viewer.classes()
    heats = before.heat.detach().cpu(), after.heat.detach().cpu()
    right = srgs = None
    if classes is not None and before.output.dim() == 2:
        single = one_output(before.output, len(classes))
        answers = ((seen.output[:, 0] > 0).long() if single else seen.output.argmax(1) for seen in (before, after))
        first, last = (answer.cpu() == classes for answer in answers)
        right = first, last
        if faithful:
            first, last = _faithful(viewer, original, heats[0], classes), _faithful(viewer, small, heats[1], classes)
            srgs = (first, last) if first is not None and last is not None else None
    return Drift(viewer.agreement(after.heat), classes, srgs, right, heats)


def _faithful(viewer: Viewer, model: nn.Module, heat: Tensor, classes: Tensor) -> Tensor | None:
    """The SRG of heat maps, where parts of the samples can be covered."""
    x, text = to_device(viewer.x, device_of(model)), viewer.before.text
    if isinstance(x, Tensor):
        return srg(model, x, heat, classes) if x.dim() == 4 else None
    return srg_of_texts(model, x, heat, text.counts, classes) if text is not None and maskable(x) else None
