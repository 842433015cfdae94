"""The task of a command about text: a language model or a text classifier, its tokenizer, and the texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from secateur.cli.given_model import count_outputs
from secateur.cli.options import Texts
from secateur.cli.outcome import answered, time_files, write_page
from secateur.cli.output import Printer
from secateur.data.text import Batch, Sentences, Tokens, in_batches, read_lines, read_sentences
from secateur.errors import Argument, DataError
from secateur.files.architecture import note_of
from secateur.files.formats import as_stock
from secateur.files.session import fixed_batch
from secateur.latency.timing import Timing, repeated, time_in_turn
from secateur.loop.prune import Result
from secateur.models import Opened
from secateur.models.hub import HUB, label_names, longest_text, quiet_hub, tokenizer_of
from secateur.nest import select_samples
from secateur.recover import write_text
from secateur.report import Page
from secateur.report.answers import Answers
from secateur.running.accuracy import Accuracy, accuracy, perplexity
from secateur.running.devices import device_of, to_device
from secateur.running.targets import Reader
from secateur.runtimes import Setup
from secateur.structure.cost import size_of

_HELD_OUT = 0.2  # of the text, if there is no other to test on
_TEST = 64, 1000  # sequences to test on, or texts with labels, if the user does not say
_CONTEXT = 1024  # tokens that a prediction sees at most, as in published perplexities
_LOGITS = 2**27  # numbers that a model may return for one batch
_SHOWN, _PASSAGE = 2, 24  # passages in the report, and their tokens
_BATCHES = 1, 8


@dataclass(frozen=True, eq=False)
class TextTask:
    """A model of text, and the texts to score units and to measure it on. `classes` is empty for a language model."""

    opened: Opened
    tokenizer: Any
    length: int
    reference: list[Batch]
    test: list[Batch] | None
    about: tuple[str, str]  # what units are scored on, and what the model is tested on
    classes: tuple[str, ...] = ()
    measured: dict[int, Accuracy] = field(default_factory=dict, repr=False)  # by size of the model

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.opened.model

    @property
    def sample(self) -> str:
        """What one sample is, in words."""
        return f"{self.example()['input_ids'].shape[1]} tokens"

    def data(self) -> list[Batch]:
        """The texts to score on."""
        found: list[Batch] = to_device(self.reference, device_of(self.model))
        return found

    def example(self) -> dict[str, Tensor]:
        """Two of these texts."""
        found: dict[str, Tensor] = to_device(select_samples(self.reference[0][0], slice(2)), device_of(self.model))
        if len(found["input_ids"]) < 2:
            return {name: torch.cat([tensor, tensor]) for name, tensor in found.items()}
        return found

    def found(self) -> dict[str, Any]:
        """What a run is recognised by, beside the options."""
        sets = {"reference": self.reference, "held_out": self.test}
        return {name: None if data is None else f"{self._size(data)}, {_digest(data)}" for name, data in sets.items()}

    def _size(self, data: Sequence[Batch]) -> str:
        """How much text there is, in words."""
        count, length = sum(len(inputs["input_ids"]) for inputs, _ in data), data[0][0]["input_ids"].shape[1]
        return _count(count, "text") if self.classes else f"{_count(count, 'sequence')} of {length} tokens"

    @property
    def counts(self) -> dict[str, Any]:
        """How many samples are used for what, for JSON."""
        scored, tested = (
            sum(len(inputs["input_ids"]) for inputs, _ in data) for data in (self.reference, self.test or [])
        )
        return {"texts": {"reference": scored, "test": tested, "tokens": self.length}}

    @property
    def load(self) -> tuple[float, float]:
        """How many texts as long as the example units are scored on, and accuracy is measured on."""
        sizes = [sum(inputs["input_ids"].numel() for inputs, _ in data) for data in (self.reference, self.test or [])]
        each = self.example()["input_ids"].shape[1]
        return sizes[0] / each, sizes[1] / each

    @property
    def tested(self) -> dict[str, int]:
        """How many texts each accuracy is measured on. (Tokens of a text are not independent of each other.)"""
        found = torch.cat([y for _, y in self.test or () if isinstance(y, Tensor)] or [torch.zeros(0)])
        if not self.classes or not len(found):
            return {}
        counts = {name: int((found == number).sum()) for number, name in enumerate(self._names)}
        return {"overall": len(found)} | {name: count for name, count in counts.items() if count}

    def introduction(self, use: str = "scored on") -> list[str]:
        """Which texts are used for what, in lines."""
        tested = f"tested on: {self.about[1]}" if self.test is not None else "there is no text to test on"
        return [f"{use}: {self.about[0]}", tested]

    @property
    def evaluate(self) -> Callable[[nn.Module], dict[str, float]] | None:
        """What a model is measured by: perplexity and accuracy of the next token, or accuracy by class."""
        return None if self.test is None else self.measure

    def measure(self, model: nn.Module) -> dict[str, float]:
        """The numbers, by name."""
        if not self.classes:
            return perplexity(model, self.test).named()
        found = self.measured[size_of(model)] = accuracy(model, self.test)
        return found.named(lambda number: self._names[number])

    @property
    def _names(self) -> list[str]:
        return [f"class {name}" if name in ("overall", "worst") else name for name in self.classes]

    def training_batches(self, size: int | None = None) -> Any:
        """For training."""
        if size is None:
            return self.data()
        return [
            (select_samples(inputs, part), select_samples(targets, part))
            for inputs, targets in self.data()
            for part in (slice(begin, begin + size) for begin in range(0, len(inputs["input_ids"]), size))
        ]

    def save(self, result: Result, folder: Path) -> None:
        """Write the smaller model as transformers does, in the number format that the unpruned one has on disk."""
        small, stored = result.model, self.opened.stored
        if stored is not None and any(p.dtype != stored for p in small.parameters()):
            small = as_stock(deepcopy(small), stored)
        with quiet_hub():
            replace(result, model=small).save_pretrained(folder, tokenizer=self.tokenizer)

    def times(self, result: Result, files: Mapping[str, Path], printer: Printer, setup: Setup) -> list[Timing]:
        """Both models in turn: in PyTorch, and in ONNX Runtime if there is a file for it."""
        example, batches = self.example(), sorted({*_BATCHES, setup.batch})
        tokens, threads = example["input_ids"].shape[1], setup.threads if setup.device == "cpu" else 0
        with setup.threaded():
            with printer.stage(f"timing both models for {', '.join(map(str, batches))} texts"):
                times = [time_in_turn([self.model, result.model], repeated(example, batch)) for batch in batches]
            found = [Timing(batch, old, new) for batch, (old, new) in zip(batches, times, strict=True)]
            found += time_files(self.model, files, example, batches, printer)
        return [replace(timing, tokens=tokens, threads=threads) for timing in found]

    def report(
        self, path: Path, result: Result, timings: Sequence[Timing], more: Mapping[str, str] = MappingProxyType({})
    ) -> Path:
        """Write the page, with the words of a few passages in colours."""
        about = {"scored on": self.about[0], "tested on": self.about[1], **more}
        page = Page(
            title=f"{self.opened.origin.model.removeprefix(HUB)} pruned by {result.settings['criterion']}", about=about,
            latency=timings or False, tokenizer=self.tokenizer, answers=self._answers(result),
        )  # fmt: skip
        return write_page(result, path, self.shown(), original=self.model, classes=self.meanings or None, page=page)

    @property
    def meanings(self) -> dict[int, str]:
        """What the outputs mean, if the model is a classifier."""
        return dict(enumerate(self.classes))

    def shown(self) -> tuple[dict[str, Tensor], Tensor | None]:
        """Short texts to explain: of different classes, or from different places."""
        batches = self.test if self.test is not None else self.reference
        inputs, targets = batches[0]
        if targets is not None:
            order = sorted(range(len(targets)), key=lambda i: (targets[:i].tolist().count(int(targets[i])), i))
            chosen = torch.tensor(order[:_SHOWN])
            return select_samples(inputs, chosen), targets[chosen]
        rows = torch.cat([inputs["input_ids"] for inputs, _ in batches])[:, :_PASSAGE]
        return {"input_ids": rows[:: max(1, len(rows) // _SHOWN)][:_SHOWN]}, None

    def _answers(self, result: Result) -> Answers | None:
        """What both models say to the test texts, if these have labels."""
        if not self.classes or self.test is None:
            return None
        return answered(self.measured, self.measure, (self.model, result.model), self.test)

    def exported(self, onnx: Path) -> str:
        """What the exported model takes, in words."""
        return f"{', '.join(self.example())}, each {fixed_batch(onnx) or 'N'} x tokens"


def opened_by_transformers(folder: Path, model: nn.Module) -> str:
    """How transformers opens a saved folder, in words; empty if it does not."""
    if (note_of(folder) or {}).get("widths") != "uniform":
        return ""
    return f"transformers opens it by itself: {type(model).__name__}.from_pretrained({str(folder)!r})"


def how_to_open(folder: Path, result: Result, uniform: bool) -> str:
    """How a saved folder is opened, in words."""
    if alone := opened_by_transformers(folder, result.model):
        return alone
    if not uniform:
        own = f"secateur.load({str(folder)!r})"
        return f"{own}, since its blocks have different widths. For transformers alone: --uniform"
    model: Any = result.model
    path = next((name for name, part in model.named_modules() if part is model.get_input_embeddings()), "")
    width = (
        [name for name, (had, has) in result.plan.layers.items() if name == path and has < had] if result.plan else []
    )
    fix = f"--ignore {path}, which keeps the width between blocks" if width else "--ignore '*attention*'"
    return f"secateur.load({str(folder)!r}), since no config of transformers describes its widths. Fix: {fix}"


def read_text_task(opened: Opened, given: Texts) -> TextTask:
    """Read the texts and divide them."""
    assert given.text is not None
    tokenizer = tokenizer_of(opened.origin.model)
    most = longest_text(opened.model, tokenizer)
    if given.tokens > most:
        tokens, fits = (Argument("tokens", count) for count in (given.tokens, most))
        raise DataError(
            "{tokens}: this model takes at most {most} tokens.", fix="{fits}", tokens=tokens, most=most, fits=fits
        )
    return _labelled(opened, tokenizer, given) if given.labels else _running(opened, tokenizer, given)


def _running(opened: Opened, tokenizer: Any, given: Texts) -> TextTask:
    """A language model and running text."""
    model: Any = opened.model
    if not Reader(model).causal:
        raise DataError(
            f"{type(model).__name__} does not foretell the next token, so that plain text is not enough.",
            fix="--labels, if it is a classifier of texts; else the Python functions",
        )
    tokens = Tokens.of(read_lines(given.text), tokenizer)  # type: ignore[arg-type]
    if given.test_text is not None:
        held, name = Tokens.of(read_lines(given.test_text), tokenizer), str(given.test_text)
    else:
        (tokens, held), name = tokens.split(_HELD_OUT), f"the last fifth of {given.text}"
    ids = tokens.sequences(given.tokens, given.sequences, str(given.text))
    return _language(opened, tokenizer, given, ids, f" of {given.text}", (held, name))


def write_text_task(opened: Opened, teacher: nn.Module, given: Texts, seed: int) -> TextTask:
    """A language model and text that its teacher writes. The same seed writes the same."""
    tokenizer = tokenizer_of(opened.origin.model)
    given = replace(given, tokens=min(given.tokens, longest_text(opened.model, tokenizer)))
    ids = write_text(teacher, given.sequences, given.tokens, seed)["input_ids"]
    held = None
    if given.test_text is not None:
        held = Tokens.of(read_lines(given.test_text), tokenizer), str(given.test_text)
    return _language(opened, tokenizer, given, ids, " that the teacher wrote", held)


def _language(
    opened: Opened, tokenizer: Any, given: Texts, ids: Tensor, origin: str, held: tuple[Tokens, str] | None
) -> TextTask:
    """A language model, the sequences `ids`, and text that it is tested on, with its name."""
    model: Any = opened.model
    check_tokens(opened, ids)
    outputs = len(model.get_input_embeddings().weight)

    def batched(rows: Tensor) -> list[Batch]:
        return in_batches(rows, max(1, min(32, _LOGITS // (rows.shape[1] * outputs))))

    about, tested, test = f"{_count(len(ids), 'sequence')} of {given.tokens} tokens{origin}", "", None
    if held is not None:
        tokens, name = held
        context = min(_CONTEXT, longest_text(model, tokenizer), max(len(tokens) + len(tokens.begin), 2))
        rows = tokens.sequences(context, given.test_sequences or _TEST[0], name)
        check_tokens(opened, rows)
        tested, test = f"{_count(len(rows), 'sequence')} of {context} tokens of {name}", batched(rows)
    return TextTask(opened, tokenizer, given.tokens, batched(ids), test, (about, tested))


def _labelled(opened: Opened, tokenizer: Any, given: Texts) -> TextTask:
    """A classifier and texts with labels."""
    assert given.text is not None
    if Reader(opened.model).causal:
        raise DataError(
            f"{type(opened.model).__name__} foretells tokens and is no classifier.",
            fix="plain text without --labels; or a classifier, …ForSequenceClassification",
        )
    outputs, names = count_outputs(opened), label_names(opened.model)
    columns = tuple(part.strip() for part in given.columns.split(",")) if given.columns is not None else None
    if columns is not None and (len(columns) != 2 or not all(columns)):
        raise DataError(
            "{columns} must name two columns, as in TEXT,LABEL.", columns=Argument("columns", given.columns)
        )
    if tokenizer.pad_token_id is None:
        raise DataError(
            "the tokenizer has no token for padding, so that texts of different lengths make no batch.",
            fix="the tokenizer that the classifier was trained with, saved beside it",
        )
    texts = read_sentences(given.text, outputs, names, columns)
    if given.test_text is not None:
        held, where = read_sentences(given.test_text, outputs, names, columns), str(given.test_text)
    else:
        (texts, held), where = texts.split(_HELD_OUT), f"the last fifth of {given.text}"
    drawn, tested = texts.draw(given.sequences), held.draw(given.test_sequences or _TEST[1])
    about = tuple(
        f"{_of_classes(texts)} of {name}{_cut(texts.texts, tokenizer, given.tokens)}"
        for texts, name in ((drawn, given.text), (tested, where))
    )
    reference = drawn.batches(tokenizer, 16, given.tokens)
    test = tested.batches(tokenizer, 16, given.tokens) if len(tested) else None
    for inputs, _ in (*reference, *(test or ())):
        check_tokens(opened, inputs["input_ids"])
    return TextTask(opened, tokenizer, given.tokens, reference, test, (about[0], about[1]), drawn.classes)


def check_tokens(opened: Opened, ids: Tensor) -> None:
    """Raise if the tokenizer gives a number that the model has no entry for."""
    model: Any = opened.model
    known, highest = len(model.get_input_embeddings().weight), int(ids.max())
    if highest >= known:
        raise DataError(
            f"the tokenizer beside {opened.origin.model} is not of this model: it gives token number {highest}, "
            f"and the model knows {known} tokens.",
            fix="tokenizer.save_pretrained(FOLDER), with the tokenizer that the model was trained with",
        )


def _cut(texts: Sequence[str], tokenizer: Any, length: int) -> str:
    """How many texts lose their end, in words."""
    longer = sum(len(ids) > length for ids in tokenizer(list(texts), verbose=False)["input_ids"]) if texts else 0
    return f", {longer} of them cut after {length} tokens" if longer else ""


def _of_classes(texts: Sentences) -> str:
    each = ", ".join(f"{number} {name}" for name, number in list(texts.counts.items())[:6])
    return f"{_count(len(texts), 'text')} ({each}{', …' if len(texts.classes) > 6 else ''})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _digest(batches: Sequence[Batch]) -> str:
    """A fingerprint of batches."""
    found = hashlib.sha256()
    for inputs, targets in batches:
        for tensor in (*inputs.values(), *([] if targets is None else [targets])):
            found.update(f"{tuple(tensor.shape)}".encode() + tensor.cpu().numpy().tobytes())
    return found.hexdigest()[:16]
