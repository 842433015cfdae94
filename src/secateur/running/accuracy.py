"""How often a classifier is right, and how well a language model foretells a text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from secateur.errors import DataError
from secateur.running.batches import Batch, Data, batches, parts_of, size_of, total_of
from secateur.running.copies import shared_copy, unwrap
from secateur.running.devices import device_of
from secateur.running.layout import Order, in_best_order, unordered
from secateur.running.logits import logits_of, one_output
from secateur.running.memory import Memory, in_smaller_parts, limited, together
from secateur.running.progress import Evaluating, Pace
from secateur.running.sandbox import leaves_no_trace, run
from secateur.running.targets import IGNORED, Reader, is_binary

#: What the perplexity is called among metrics.
PERPLEXITY = "perplexity"


@dataclass(frozen=True)
class Accuracy:
    """The share of right answers on some samples, overall and by class number. `float(…)` is the overall one.

    `targets` and `answers` have the class of each sample and what the model said, if it gives one answer per sample.
    """

    overall: float
    classes: Mapping[int, float]
    samples: int
    targets: Sequence[int] = field(default=(), repr=False, compare=False)
    answers: Sequence[int] = field(default=(), repr=False, compare=False)

    def __float__(self) -> float:
        return self.overall

    @property
    def interval(self) -> tuple[float, float]:
        """Between which shares the accuracy on all samples of this kind lies, with 95 % confidence."""
        return interval(self.overall, self.samples)

    def named(self, name: Callable[[int], str] = str) -> dict[str, float]:
        """The shares as `prune(evaluate=…)` and a history hold them: "overall", and each class by its name."""
        return {"overall": self.overall} | {name(number): share for number, share in self.classes.items()}


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a share that was seen on so many samples.

    >>> [round(side, 3) for side in interval(0.9, 10)], [round(side, 3) for side in interval(0.9, 1000)]
    ([0.596, 0.982], [0.88, 0.917])
    """
    z = 1.959964
    middle, width = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max(0.0, (middle - width) / (1 + z * z / count)), min(1.0, (middle + width) / (1 + z * z / count))


def between(share: float, count: int) -> str:
    """That interval in words, in percent; nothing if it is not known on how many samples.

    >>> between(0.9, 20), between(0.9, 2000), between(0.9, 0)
    ('70 to 97', '88.6 to 91.2', '')
    """
    if not count:
        return ""
    low, high = (100 * side for side in interval(share, count))
    digits = 0 if high - low > 5 else 1
    return f"{low:.{digits}f} to {high:.{digits}f}"


@leaves_no_trace
def accuracy(model: nn.Module, data: Data, batch_size: int = 32, *, memory: Memory = None) -> Accuracy:
    """The accuracy of a model in evaluation mode on a pair (X, y) or on batches of inputs and targets.

    A model with a single output answers 1 where that is positive, else 0. NaN is no right answer. If there is an answer
    for each position, as for tokens and pixels, the positions are counted: neither padding nor those whose target is
    -100. A language model of transformers answers for the next token. Large batches are taken in parts that need no
    more than `memory` (bytes, or a text such as "2 GiB"; default: what is free).

    >>> accuracy(nn.Identity(), (torch.eye(3), torch.tensor([0, 1, 1])))
    Accuracy(overall=0.6666666666666666, classes={0: 1.0, 1: 0.5}, samples=3)
    """
    right: Counter[int] = Counter()
    seen: Counter[int] = Counter()
    said = list[tuple[int, int]]()
    model = shared_copy(unwrap(model)).eval()
    reader, size = Reader(model), 0
    order: Order = unordered

    def answered(inputs: Any, targets: Any) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """The targets that the model hits, and all; what it should say and says, if that is one answer per sample."""
        reading = reader.read(inputs, targets, logits_of(run(model, order(inputs))))
        output, wanted = reading.logits, reading.known()
        single = one_output(output, wanted.numel())
        if wanted.is_floating_point() and not (single and is_binary(wanted)):
            raise DataError("accuracy needs class numbers as targets; each is 0 or 1 if the model has one output.")
        given = (output > 0).to(wanted.dtype) if single else output.argmax(1)
        said_nothing = (output if single else output.gather(1, given[:, None])[:, 0]).isnan()  # NaN is the largest
        hits = (given == wanted) & ~said_nothing
        whole, pairs = wanted[wanted != IGNORED].long().tolist(), list[tuple[int, int]]()
        if len(whole) == wanted.numel() == size_of(inputs):
            pairs = list(zip(whole, given.reshape(-1).long().tolist(), strict=True))
        return wanted[hits].long().tolist(), whole, pairs

    with limited(memory), torch.no_grad():
        pace = Pace(Evaluating(), total_of(data))
        for batch in batches(data, batch_size, device_of(model)):
            if not size:
                size = together(model, batch[0])
                if size < size_of(batch[0]):  # large images
                    model, order = in_best_order(model, next(parts_of(*batch, 1))[0])

            def in_parts(most: int, batch: Batch = batch) -> list[tuple[list[int], list[int], list[tuple[int, int]]]]:
                return [answered(*part) for part in parts_of(*batch, most)]

            for hits, known, pairs in in_smaller_parts(in_parts, min(size, max(size_of(batch[0]), 1))):
                right.update(hits)
                seen.update(known)
                said += pairs
            pace(size_of(batch[0]))
    if not seen:
        raise DataError("the test data are empty: there is no batch in them, or no target that counts.")
    shares = {c: right[c] / seen[c] for c in sorted(seen)}
    targets, answers = zip(*said, strict=True) if len(said) == seen.total() else ((), ())
    return Accuracy(right.total() / seen.total(), shares, seen.total(), targets, answers)


@dataclass(frozen=True)
class Perplexity:
    """How well a language model foretells the next token of some texts. `float(…)` is the perplexity.

    The perplexity is the exponential of the mean negative log-likelihood of a token. `accuracy` is the share of tokens
    to which the model gave the highest probability.
    """

    perplexity: float
    accuracy: float
    tokens: int

    def __float__(self) -> float:
        return self.perplexity

    def named(self) -> dict[str, float]:
        """The numbers as `prune(evaluate=…)` and a history hold them: the accuracy is "overall"."""
        return {"overall": self.accuracy, PERPLEXITY: self.perplexity}


@leaves_no_trace
def perplexity(model: nn.Module, data: Data, batch_size: int = 8) -> Perplexity:
    """The perplexity of a language model of transformers in evaluation mode on batches of token numbers.

    Each sequence is a text of its own: its first token is given, and all others are foretold. Padding does not count.
    """
    model = shared_copy(unwrap(model)).eval()
    reader = Reader(model)
    if not reader.causal:
        raise DataError(f"{type(model).__name__} does not foretell the next token.", fix="accuracy(model, data)")
    loss, right, tokens, pace = 0.0, 0, 0, Pace(Evaluating(), total_of(data))
    with torch.no_grad():
        for inputs, targets in batches(data, batch_size, device_of(model)):
            reading = reader.read(inputs, targets, logits_of(run(model, inputs)))
            for logits, wanted in zip(reading.logits, reading.known(), strict=True):  # one at a time: logits are large
                counts = wanted != IGNORED
                rows, wanted = logits.movedim(0, -1)[counts].float(), wanted[counts]
                loss += float(F.cross_entropy(rows, wanted, reduction="sum").double())
                right += int((rows.argmax(1) == wanted).sum())
                tokens += len(wanted)
            pace(size_of(inputs))
    if not tokens:
        raise DataError("the test data are empty: there is no token to foretell.")
    return Perplexity(math.exp(min(loss / tokens, 700.0)), right / tokens, tokens)
