"""`explain`: which inputs and which units made the model give its answer, in numbers and as a heat map."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from secateur import atomic
from secateur.arguments import check_choice, check_count
from secateur.errors import Argument, DataError, SecateurError
from secateur.nest import map_tensors, select_samples, tensors_in
from secateur.relevance.composites import Composite
from secateur.relevance.conservation import Conservation
from secateur.relevance.engine import RelevancePass
from secateur.relevance.ledger import Absolute
from secateur.relevance.rules import Rule
from secateur.relevance.starts import AtGoal, How, Position, Starter, Target, begun, check_target
from secateur.relevance.text import Text, Word, draw_text, page
from secateur.relevance.weights import path_of
from secateur.running.batches import as_batch, as_tensors, counted, masks_in
from secateur.running.copies import check_followed, shared_copy, unwrap
from secateur.running.goals import Goal
from secateur.running.logits import logits_of
from secateur.running.memory import Memory, in_smaller_parts, limited, resident, together, trim_beyond
from secateur.running.sandbox import isolated, leaves_no_trace, run, run_or_explain
from secateur.running.targets import Reader, ids_in

#: What has the most faithful heat maps of pictures (`docs/results/faithfulness.md`). Scoring has its own default.
PICTURES = "epsilon_gamma_box"
# A network of pictures that convolves and then attends is explained as one that convolves, from this share of weights.
_CONVOLVES = 0.25


@dataclass(frozen=True, repr=False)
class Explanation:
    """Relevance of inputs and units for `target`.

    `input` is shaped like the inputs (a list if there were several). Of token numbers, it has the relevance of what
    their embeddings return; `heat` and `tokens` add up all embeddings of a token. `units` has one number per output
    channel or neuron of each conv and linear layer (per column of an embedding), summed over samples and space, by
    module path; `weights` has the same by parameter name. Layers that only make gates (squeeze-and-excitation, queries
    and keys) take no relevance. They are scored by what the gate lets pass. These scores are not part of the total.
    `classes` are the explained classes, one for each sample and position, -100 where no relevance starts. `against`
    are those that they are held against.
    """

    input: Tensor | list[Tensor | None]
    units: dict[str, Tensor]
    weights: dict[str, Tensor]
    output: Any
    conservation: Conservation
    images: Any = None
    text: Text | None = None
    classes: Tensor | None = None
    against: Tensor | None = None

    def __repr__(self) -> str:
        shape = tuple(self.heat.shape)
        first = "" if self.text is None else f", {self.first_token:.1%} of it on the first token"
        return f"Explanation(relevance of shape {shape}{first}; {len(self.units)} layers; {self.conservation!r})"

    @property
    def composite(self) -> str:
        """The composite that was used."""
        return self.conservation.composite

    @property
    def heat(self) -> Tensor:
        """The first input's relevance summed over channels: one map per sample, or one number per token."""
        if self.text is not None:
            return self.text.relevance
        first = self.input if isinstance(self.input, Tensor) else next(t for t in self.input if t is not None)
        return first.sum(1) if first.dim() == 4 else first.sum(-1) if first.dim() == 3 else first

    @property
    def first_token(self) -> float:
        """The share of all relevance, by size, that lies on the first token of each text. Many language models attend
        to that token whatever it is."""
        return self._text().first_token

    def tokens(self, tokenizer: Any = None) -> list[list[Word]]:
        """The words of each text with their relevance. `tokenizer` is one of transformers, or gives texts by number;
        it also tells which tokens are one word. Without it there is a token number for each."""
        return self._text().words(tokenizer)

    def heads(self, layer: str, count: int) -> Tensor:
        """The relevance of each of `count` attention heads: sums over the units of a layer, such as a layer of values.

        >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        >>> explain(net, torch.rand(3, 4), target=0).heads("0", 3).shape
        torch.Size([3])
        """
        if layer not in self.units:
            near = difflib.get_close_matches(layer, self.units, 3, 0.3)
            raise DataError(f"no units are made in `{layer}`.", fix=f"a layer, such as {', '.join(near or self.units)}")
        check_count("count", count)
        units = self.units[layer]
        if len(units) % count:
            raise DataError(f"`{layer}` has {len(units)} units, which are not {count} heads of one size.")
        return units.view(count, -1).sum(1)

    def plot(self, path: str | Path, *, clip: float = 0.995, tokenizer: Any = None) -> Path:
        """A PNG: each image beside its heat map, with the numbers of the output that won and of the one explained, or
        the words of each text. Red speaks for the target, blue against it, white is 0.

        Colours saturate at the `clip` quantile of the absolute values, so that one pixel does not hide the rest.
        """
        if self.text is not None:
            return draw_text(self.tokens(tokenizer), Path(path), clip)
        said, why, titles = self.output, self.classes, []
        if isinstance(said, Tensor) and said.dim() == 2 and said.shape[1] > 1 and why is not None and why.dim() == 1:
            pairs = zip(said.argmax(1).tolist(), why.tolist(), strict=True)
            titles = [(f"says output {won}", f"relevance for output {seen}") for won, seen in pairs]
        return draw(self.images, self.heat, Path(path), clip, titles)

    def html(self, path: str | Path, *, tokenizer: Any = None, clip: float = 0.995) -> Path:
        """A page that shows the words of each text in colours, as `plot` does, and their numbers."""
        text = self._text()
        said = [text.said(i, self.classes, self.against, tokenizer) for i in range(len(text.counts))]
        atomic.write(Path(path), page(text.words(tokenizer), said, self.first_token, clip).encode())
        return Path(path)

    def _text(self) -> Text:
        if self.text is None:
            raise DataError("the inputs are no token numbers, so there are no words.", fix="plot, heat, or units")
        return self.text


@leaves_no_trace
def explain(
    model: nn.Module,
    inputs: Any,
    target: Target = None,
    *,
    against: Target = None,
    position: Position = None,
    composite: str | Composite | Rule | None = None,
    start: How | None = None,
    absolute: Absolute = False,
    memory: Memory = None,
) -> Explanation:
    """Relevance of inputs and units for `target`: a class, one per sample, None for the predicted class, a goal such as
    `secateur.criteria.Detection()`, or a function of the output that returns what counts, one number or one per sample,
    or the relevance that each number of the output starts with. Each sample starts with 1, or with its logit. If a
    model has one output for two classes, relevance starts there whether a target is 0 or 1.

    `against` is another class: it starts with the opposite sign, which explains why the one and not the other.
    `position` says which position of a text is explained, one for all samples or one for each. It counts tokens that
    are no padding; -1 is the last. By default this is the last one if the model generates text, else all. The classes
    of a language model are its tokens. A model without a head returns states: without a target, each number of a state
    starts with its square, which explains the length of the state.

    Without a `composite`, it is "attnlrp" for models with attention that hardly convolve; it starts with the logit.
    For others it is "epsilon_gamma_box" if the inputs are pictures, and else "alpha1beta0"; both start with 1.
    `.composite` says which was used. Units are scored by other composites than pictures are explained by: see
    `secateur.criteria`. Many samples are taken in parts that need no more than `memory` (bytes, or a text such as
    "2 GiB"; default: what is free).

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3))
    >>> seen = explain(net, torch.rand(2, 3, 2, 2), target=1)
    >>> seen.input.shape, seen.units["1"].shape
    (torch.Size([2, 3, 2, 2]), torch.Size([4]))
    """
    check_choice("start", start, (None, "one", "logit"))
    check_choice("absolute", absolute, get_args(Absolute))
    check_target(target)
    check_target(against, "against")
    if against is not None and (
        callable(target) or isinstance(target, Goal) or (isinstance(target, Tensor) and target.is_floating_point())
    ):
        fix = "let the function start with less than 0 there"
        raise DataError("{against} needs a class as target.", fix=fix, against=Argument("against", against))
    inputs = as_batch(inputs)[0] if isinstance(inputs, Mapping) else as_tensors(inputs)
    if not tensors_in(inputs):
        what = f"inputs is a {type(inputs).__name__} without a tensor."
        raise DataError(what, fix="a tensor, or a tuple or dict of tensors")
    original = unwrap(model)
    check_followed(original)  # before it is copied: what cannot be followed often cannot be copied
    pictures = all(tensor.dim() == 4 for tensor in tensors_in(inputs))
    otherwise, least = (PICTURES, _CONVOLVES) if pictures else ("alpha1beta0", 0.5)
    engine = RelevancePass(shared_copy(original), composite, absolute=absolute, otherwise=otherwise, least=least)
    reader = Reader(engine.model)
    how = lambda: start or engine.composite.start  # noqa: E731 (only the forward tells which composite is used)
    begin: Starter | AtGoal = Starter(target, how, samples_in(inputs), reader, inputs, against, position)
    if isinstance(target, Goal):
        begin = AtGoal(target, None, how)

    def explained(most: int) -> tuple[Tensor, list[Tensor | None]]:
        engine.reset()  # nothing of an attempt that had too little memory
        output = _answers(engine, inputs, most) if isinstance(begin, Starter) else None
        if output is None:
            output, heat = engine.run(inputs, begin)
        else:
            heat = _in_parts(engine, inputs, begin(output), most)
        seen = begin.seen if isinstance(begin, AtGoal) else output
        shared = isinstance(seen, Tensor) and _shared(inputs, heat)
        return output, _in_parts(engine, inputs, begin(output), 1) if shared else heat

    held = resident()
    try:
        with limited(memory):
            output, heat = in_smaller_parts(explained, together(engine.model, inputs, backward=True))
            trim_beyond(held)
    except SecateurError:
        raise
    except Exception:
        with isolated(engine.model, tensors_in(inputs)), torch.no_grad():
            run_or_explain(engine.model, inputs)  # if the model itself fails, its error says so
        raise
    conservation = engine.conservation()
    conservation.warn()
    first = heat[0] if len(heat) == 1 and heat[0] is not None else heat
    units = {name: sums.to(output.dtype) for name, sums in engine.units.items()}
    images, text = next((tensor.detach() for tensor in tensors_in(inputs)), None), _text(inputs, heat, reader.generates)
    paths = {path_of(name): sums for name, sums in units.items()}
    seen = begin.seen if isinstance(begin, AtGoal) else output
    said = (begin.classes, begin.others) if isinstance(begin, Starter) else (None, None)
    return Explanation(first, paths, units, seen, conservation, images, text, *said)


def fitting(model: nn.Module, inputs: Any) -> str:
    """The composite that `explain` chooses for a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return explain(model, select_samples(inputs, slice(1))).composite


# -- texts -------------------------------------------------------------------------------------------------------------
def _token_shape(inputs: Any) -> tuple[int, int] | None:
    """Samples and positions, if the inputs are a text."""
    ids = ids_in(inputs)
    read = inputs.get("inputs_embeds") if ids is None and isinstance(inputs, Mapping) else ids
    return (read.shape[0], read.shape[1]) if isinstance(read, Tensor) and read.ndim > 1 else None


def _embedded(inputs: Any, heat: list[Tensor | None]) -> list[Tensor]:
    """The relevance of all that is looked up for the tokens: (samples or 1, positions, width) each.

    Words, positions and kinds of tokens have embeddings. What a decoder reads of its own is left out.
    """
    shape = _token_shape(inputs)
    if shape is None:
        return []
    samples, length = shape
    given = [t for t in tensors_in(inputs) if t.is_floating_point()]
    own = [
        h for t, h in zip(given, heat, strict=False) if tuple(t.shape[:2]) == shape and t.ndim == 3 and h is not None
    ]
    looked_up = [_by_token(h, samples, length) for h in heat[len(given) :] if h is not None]
    parts = [h for h in looked_up if h.ndim == 3 and len(h) in (1, samples) and h.shape[1] == length]
    if samples == length:  # a table of positions by positions looks like that too
        parts = [h for h in parts if h.shape[2] == parts[0].shape[2]]
    other = inputs.get("decoder_input_ids") if isinstance(inputs, Mapping) else None
    if isinstance(other, Tensor) and tuple(other.shape) == shape:
        parts = parts[: (len(parts) + 1) // 2]  # the encoder runs first
    return own + parts


def _by_token(heat: Tensor, samples: int, length: int) -> Tensor:
    """The relevance of what was looked up for positions without a dimension of texts gets one."""
    return heat[None] if heat.ndim == 2 and len(heat) == length != samples else heat


def _shared(inputs: Any, heat: list[Tensor | None]) -> bool:
    """Whether samples share an embedding, such as that of positions. Then their relevance there is one sum."""
    shape = _token_shape(inputs)
    if shape is None or shape[0] == 1:
        return False
    # As many rows as texts and positions: they are of positions if there is one row for each in a single text, too.
    unclear = shape[0] == shape[1] and any(h is not None and h.ndim == 2 and len(h) == shape[1] for h in heat)
    return unclear or any(len(part) == 1 for part in _embedded(inputs, heat))


def _answers(engine: RelevancePass, inputs: Any, size: int) -> Tensor | None:
    """The output for all samples, if they are more than `size`, and are run apart; None if they are run together."""
    samples = samples_in(inputs)
    if samples is None or samples <= size or any(t.ndim == 0 or len(t) != samples for t in tensors_in(inputs)):
        return None
    found = []
    for begin in range(0, samples, size):
        part = select_samples(inputs, slice(begin, begin + size))
        with isolated(engine.model, []), torch.no_grad():
            found.append(logits_of(run(engine.model, part), warn=False))
        if found[-1].ndim == 0 or len(found[-1]) != samples_in(part):
            return None
    one = select_samples(inputs, slice(1))
    engine.run(one, Starter(None, "one", 1, Reader(engine.model), one))  # decides which composite is used
    return torch.cat(found)


def _in_parts(engine: RelevancePass, inputs: Any, begun: Tensor, size: int) -> list[Tensor | None]:
    """The relevance of inputs and embeddings, so many samples at a time."""
    engine.reset()
    found, sizes, samples, held = [], [], len(begun), resident()
    for begin in range(0, samples, size):
        held = trim_beyond(held)
        rows = slice(begin, begin + size)
        part = map_tensors(lambda t, rows=rows: t[rows] if t.ndim and len(t) == samples else t, inputs)  # type: ignore[misc]

        def start(output: Tensor, rows: slice = rows) -> Tensor:
            if output.shape != begun[rows].shape:
                raise DataError(
                    f"the model compares the samples of a batch: its output has shape {tuple(begun.shape)} for "
                    f"{samples} samples and {tuple(output.shape)} for {len(begun[rows])}. They share embeddings of "
                    "positions or do not fit into memory, so their relevance cannot be told apart.",
                    fix="explain one sample (one text with one image) at a time",
                )
            return begun[rows]

        heat, shape = engine.run(part, start)[1], _token_shape(part)
        if size > 1 and _shared(part, heat):
            return _in_parts(engine, inputs, begun, 1)
        found.append([h if h is None or shape is None else _by_token(h, *shape) for h in heat])
        sizes.append(len(begun[rows]))
    return [_joined(parts, sizes) for parts in zip(*found, strict=True)]


def _joined(parts: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """The relevance of parts of the samples one after the other, or the sum where they share what it belongs to."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    apart = all(len(part) == size for part, size in zip(known, sizes, strict=True))
    return torch.cat(known) if apart else torch.stack(known).sum(0)


def _text(inputs: Any, heat: list[Tensor | None], speaks: bool) -> Text | None:
    """The relevance of each token; None if the inputs are no text."""
    parts, shape, ids = _embedded(inputs, heat), _token_shape(inputs), ids_in(inputs)
    if not parts or shape is None:
        return None
    relevance = torch.stack([part.sum(-1).expand(shape) for part in parts]).sum(0)
    counts = counted(masks_in(inputs, decoder=False), shape)
    counts = torch.ones(shape, dtype=torch.bool) if counts is None else counts
    return Text(None if ids is None else ids.detach(), relevance, counts.to(relevance.device), speaks)


@leaves_no_trace
def unit_relevance(
    model: nn.Module,
    data: Iterable[tuple[Any, Any]],
    *,
    composite: str | Composite | Rule | None = None,
    start: How | None = None,
    absolute: Absolute = False,
) -> tuple[dict[str, Tensor], Conservation]:
    """Relevance per unit by parameter name, summed over batches of (inputs, targets), and conservation. No heat map."""
    check_choice("start", start, (None, "one", "logit"))
    check_choice("absolute", absolute, get_args(Absolute))
    engine = RelevancePass(shared_copy(unwrap(model)), composite, absolute=absolute, heat_map=False)
    reader = Reader(engine.model)
    how = lambda: start or engine.composite.start  # noqa: E731
    for inputs, targets in data:
        samples = samples_in(inputs)
        at_data = partial(begun, reader, inputs, targets, how=how, samples=samples)
        engine.run(
            inputs, at_data if targets is None or isinstance(targets, Tensor) else Starter(targets, how, samples)
        )
    if not engine.samples:
        raise DataError("there is no batch in the data.")
    conservation = engine.conservation()
    conservation.warn()
    return engine.units, conservation


def samples_in(inputs: Any) -> int | None:
    """How many samples a batch has; None if it is a single vector, or has no tensor."""
    tensors = tensors_in(inputs)
    return len(tensors[0]) if tensors and tensors[0].dim() > 1 else None


# -- pictures ---------------------------------------------------------------------------------------------------------
def draw(
    images: Any, heat: Tensor, path: Path, clip: float = 0.995, titles: Sequence[tuple[str, str]] = ()
) -> Path:  # fmt: skip
    """One row per sample: the image, and its relevance in the colours of `seismic`, white at 0. `titles` go above."""
    if heat.dim() != 3:
        raise DataError(
            f"relevance of shape {tuple(heat.shape)} is no picture: only inputs of shape (N, C, H, W) can be drawn."
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SecateurError("drawing needs matplotlib.", fix="pip install 'secateur[report]'") from error
    rows = heat.shape[0]
    figure = Figure(figsize=(6.4, (3.5 if titles else 3.2) * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 2, squeeze=False)
    for row, (image, relevance) in enumerate(zip(images, heat, strict=True)):
        axes[row][0].imshow(visible(image))
        flat = relevance.detach().float().cpu()
        limit = bound(flat, clip)
        axes[row][1].imshow(flat.numpy(), cmap="seismic", vmin=-limit, vmax=limit)
        for axis, title in zip(axes[row], titles[row] if titles else ("", ""), strict=True):
            axis.set_axis_off()
            axis.set_title(title, fontsize=10, parse_math=False)
    with warnings.catch_warnings(), atomic.naming_failures(path), atomic.replacing(path) as staged:
        warnings.filterwarnings("ignore", "Glyph")  # names of classes may be in any script
        figure.savefig(staged, dpi=100, format="png")
    return path


def bound(heat: Tensor, clip: float = 0.995) -> float:
    """Where colours saturate: the `clip` quantile of the absolute values, so that one pixel does not hide the rest."""
    size = heat.detach().abs().flatten()
    return float(size.quantile(clip)) or float(size.max()) or 1.0


def visible(image: Tensor) -> Any:
    """An image tensor of any range as an array (H, W) or (H, W, 3) in [0, 1]."""
    picture = image.detach().float().cpu()
    low, high = picture.amin(), picture.amax()
    if low < 0 or high > 1:
        picture = (picture - low) / (high - low).clamp(min=1e-12)
    if picture.shape[0] >= 3:
        return picture[:3].permute(1, 2, 0).numpy()
    return torch.stack([picture[0]] * 3, -1).numpy()
