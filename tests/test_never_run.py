"""Parts of a model that the example does not run: what they may read stays.

How a forward is written tells too little about what such a part reads: each of these models was once pruned wrongly by
a rule that read its source. So units around a part stay, if their number is one of its sizes.

The reference is the use that the example does not show. After a removal the other input must still run, and must give
what zero-masking gives, as `oracle` writes it.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import wraps
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor, nn

import secateur as sc
from benchmarks.tiny_configs import BESIDE_TEXT, BY_NAME, TEXTS_ALONE
from benchmarks.tiny_transformers import build, tokens
from constructs import randomise
from oracle import random_scores, relative_gap, zeroed


class Block(nn.Module):
    """A branch of a residual stream, whose hidden layer has as many units as the stream and as the images' layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x).relu())


class Images(nn.Module):
    """Puts images into the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.hidden, self.out = nn.Linear(5, 12), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.out(self.hidden(self.read(image)).relu())
        return out


class TextWithImages(nn.Module):
    """Reads texts, and images if there are some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.images = nn.Linear(6, 12), Images()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        if image is not None:
            x = x + self.images(image)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class InTurn(TextWithImages):
    """Blocks may see the image as well."""

    Block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(), self.Block()])

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        if image is not None:
            x = x + self.images(image)
        for block in self.blocks:
            x = self.block(block, x, image)
        out: Tensor = self.head(x)
        return out

    def block(self, block: Any, x: Tensor, image: Tensor | None) -> Tensor:
        made: Tensor = block(x)
        return made


def text() -> Tensor:
    return torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def image() -> Tensor:
    return torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def free(model: nn.Module) -> set[str]:
    """The layers that may lose units if the example is a text. With images, the smaller model equals masking."""
    model = randomise(model).double().eval()
    graph = sc.analyze(model, text())
    if graph.total_units:
        plan = sc.plan(graph, random_scores(graph), remove=0.5)
        small, masked = sc.apply(model, plan), zeroed(model, graph, plan)
        with torch.no_grad():
            for given in ((text(),), (text(), image())):
                assert relative_gap(small(*given), masked(*given)) < 1e-9
            assert relative_gap(small(text(), image()), small(text())) > 1e-3  # the image counts
    return {layer.name for layer in graph.layers if layer.prunable}


class Wider(TextWithImages):
    """The hidden layers of its blocks have numbers of their own."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.fc1, block.fc2 = nn.Linear(12, 15), nn.Linear(15, 12)


def test_units_of_another_number_may_leave() -> None:
    net = Wider()
    assert free(net) == {"blocks.0.fc1", "blocks.1.fc1"}
    reasons = {layer.reason for layer in sc.analyze(net, text()).layers if not layer.prunable}
    assert reasons == {"model output", "`images.read` never ran with this example and may read it"}


class HandedOver(InTurn):
    """Blocks get the part for images as an argument, and use it inside."""

    class Block(Block):
        def forward(self, x: Tensor, part: Any = None, image: Tensor | None = None) -> Tensor:
            y = self.fc1(x).relu()
            return x + self.fc2(y if image is None else part.hidden(y) + part.read(image))

    def block(self, block: nn.Module, x: Tensor, image: Tensor | None) -> Tensor:
        made: Tensor = block(x, self.images, image)
        return made


class HandedOverInAList(HandedOver):
    def block(self, block: nn.Module, x: Tensor, image: Tensor | None) -> Tensor:
        made: Tensor = block(x, image=image, **{"part": [self.images][0]})
        return made


class HandedOverOnlyThen(HandedOver):
    """The text alone does not show it."""

    def block(self, block: nn.Module, x: Tensor, image: Tensor | None) -> Tensor:
        made: Tensor = block(x) if image is None else block(x, self.images, image)
        return made


class Held(InTurn):
    """Blocks hold the part for images in a list, where it is no part of theirs."""

    class Block(Block):
        def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
            y = self.fc1(x).relu()
            return x + self.fc2(y if image is None else self.held[0].hidden(y) + self.held[0].read(image))

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.held = [self.images]

    def block(self, block: nn.Module, x: Tensor, image: Tensor | None) -> Tensor:
        made: Tensor = block(x, image)
        return made


class ReachesIn(InTurn):
    """The model itself runs the layers of a block, if there is an image."""

    def block(self, block: Any, x: Tensor, image: Tensor | None) -> Tensor:
        if image is None:
            made: Tensor = block(x)
            return made
        y = self.images.hidden(block.fc1(x).relu()) + self.images.read(image)
        out: Tensor = x + block.fc2(y)
        return out


class ReachesInByName(InTurn):
    def block(self, block: Any, x: Tensor, image: Tensor | None) -> Tensor:
        if image is None:
            made: Tensor = block(x)
            return made
        first, second = (getattr(block, f"fc{number}") for number in (1, 2))
        y = self.images.hidden(first(x).relu()) + self.images.read(image)
        out: Tensor = x + second(y)
        return out


class Keeps(InTurn):
    """A block keeps what its hidden layer made, for the model to read."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.fc1(x).relu()
            return x + self.fc2(self.kept)

    def block(self, block: Any, x: Tensor, image: Tensor | None) -> Tensor:
        made: Tensor = block(x)
        if image is None:
            return made
        out: Tensor = made + self.images.hidden(self.blocks[0].kept) * image.mean()
        return out


class Tied(TextWithImages):
    """A layer of the images has the weight of a hidden layer, and another one reads what it makes."""

    def __init__(self) -> None:
        super().__init__()
        first: Any = self.blocks[0]
        self.images.hidden.weight = first.fc1.weight


class Shared(TextWithImages):
    """The images run a layer of a block, which is theirs as well."""

    def __init__(self) -> None:
        super().__init__()
        first: Any = self.blocks[0]
        self.images.hidden = first.fc1


class Inner(Block):
    """Does more if it is asked to."""

    def forward(self, x: Tensor, ask: bool = False, extra: Tensor | None = None, box: Any = None) -> Any:
        y = self.features(x)
        if extra is not None:
            y = y + extra
        if box is not None:
            box.append(y)
        return (x + self.fc2(y), y) if ask else x + self.fc2(y)

    def features(self, x: Tensor) -> Tensor:
        return self.fc1(x).relu()  # type: ignore[no-any-return]


class ReturnedIfAsked(InTurn):
    """Such as `output_hidden_states=True`."""

    Block = Inner

    def block(self, block: Any, x: Tensor, image: Tensor | None) -> Tensor:
        if image is None:
            return block(x)  # type: ignore[no-any-return]
        made, inner = block(x, ask=True)
        return made + self.images.hidden(inner) * image.mean()  # type: ignore[no-any-return]


class ByAnotherMethod(InTurn):
    Block = Inner

    def block(self, block: Any, x: Tensor, image: Tensor | None) -> Tensor:
        made: Tensor = block(x)
        return made if image is None else made + self.images.hidden(block.features(x)) * image.mean()


class AddedInside(InTurn):
    Block = Inner

    def block(self, block: Any, x: Tensor, image: Tensor | None) -> Tensor:
        return block(x) if image is None else block(x, extra=self.images(image))  # type: ignore[no-any-return]


class PutIntoABox(InTurn):
    Block = Inner

    def block(self, block: Any, x: Tensor, image: Tensor | None) -> Tensor:
        box: list[Tensor] = []
        made: Tensor = block(x, box=box)
        return made if image is None else made + self.images.hidden(box[0]) * image.mean()


class RunByTheImages(InTurn):
    """The part for images is given the blocks."""

    class Images(Images):
        def forward(self, image: Tensor, x: Any = None, blocks: Any = None) -> Tensor:
            if x is None:
                return super().forward(image)
            return self.hidden(blocks[0].fc1(x).relu()) * image.mean()  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.images = self.Images()

    def block(self, block: Any, x: Tensor, image: Tensor | None) -> Tensor:
        made: Tensor = block(x)
        return made if image is None else made + self.images(image, x, self.blocks)


class ByPlace(InTurn):
    """Layers of a sequence have no names that code would need."""

    @staticmethod
    def Block() -> nn.Module:  # type: ignore[override]
        return nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))

    def block(self, block: Any, x: Tensor, image: Tensor | None) -> Tensor:
        y = x
        for layer in block if image is not None else [block]:
            y = layer(y) if image is None else layer(y) + self.images(image)
        return x + y


class ByItsWeights(InTurn):
    def block(self, block: Any, x: Tensor, image: Tensor | None) -> Tensor:
        made: Tensor = block(x)
        if image is None:
            return made
        weight, bias, *_ = block.parameters()
        inner = nn.functional.linear(x, weight, bias).relu()
        return made + self.images.hidden(inner) * image.mean()  # type: ignore[no-any-return]


class CalledOtherwise(TextWithImages):
    def __call__(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        made: Tensor = super().__call__(x)
        if image is None:
            return made
        first: Any = self.blocks[0]
        inner = self.images.hidden(first.fc1(self.embed(x)).relu())
        return made + self.head(inner) * image.mean()  # type: ignore[no-any-return]


class Asks(Block):
    """Runs the part for images inside, which it finds somewhere else, if the input is large."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x).relu()
        return x + self.fc2(self.images().hidden(y) if x.mean() > 20 else y)  # type: ignore[no-any-return]

    def images(self) -> Any:
        raise NotImplementedError


class InTheClass(InTurn):
    class Block(Asks):
        known: ClassVar[list[Any]] = []

        def images(self) -> Any:
            return self.known[0]

    def __init__(self) -> None:
        super().__init__()
        self.Block.known[:] = [self.images]

    forward = TextWithImages.forward


KNOWN: dict[str, Any] = {}
CURRENT: ContextVar[Any] = ContextVar("CURRENT")


class Registry:
    known: Any = None


class InTheFile(InTurn):
    class Block(Asks):
        def images(self) -> Any:
            return KNOWN["images"]

    def __init__(self) -> None:
        super().__init__()
        KNOWN["images"] = Registry.known = self.images
        CURRENT.set(self.images)

    forward = TextWithImages.forward


class InAnotherClass(InTheFile):
    class Block(Asks):
        def images(self) -> Any:
            return Registry.known


class InTheContext(InTheFile):
    class Block(Asks):
        def images(self) -> Any:
            return CURRENT.get()


class InADefault(InTurn):
    class Block(Asks):
        def images(self, known: Any = KNOWN) -> Any:
            return known["images"]

    def __init__(self) -> None:
        super().__init__()
        KNOWN["images"] = self.images

    forward = TextWithImages.forward


class Wrapped(TextWithImages):
    """What is around a forward is code too."""

    @staticmethod
    def also(forward: Any) -> Any:
        @wraps(forward)
        def both(self: Any, x: Tensor, image: Tensor | None = None) -> Any:
            made = forward(self, x, image)
            if image is None:
                return made
            inner = self.images.hidden(self.blocks[0].fc1(self.embed(x)).relu())
            return made + self.head(inner) * image.mean()

        return both

    forward = also(TextWithImages.forward)


class InState(TextWithImages):
    """What the images give is in a dictionary, from which blocks take it inside."""

    class Images(Images):
        def forward(self, state: Any, image: Any = None) -> Any:
            return state if image is None else {**state, "image": super().forward(image)}

    class Block(Block):
        def forward(self, state: Any) -> Any:
            y = self.fc1(state["x"]).relu() + state.get("image", 0.0)
            return {**state, "x": state["x"] + self.fc2(y)}

    def __init__(self) -> None:
        super().__init__()
        self.images, self.blocks = self.Images(), nn.ModuleList([self.Block(), self.Block()])

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        state = {"x": self.embed(x)}
        if image is not None:
            state = self.images(state, image)
        for block in self.blocks:
            state = block(state)
        out: Tensor = self.head(state["x"])
        return out


class Twice(nn.Module):
    """A second run is given what a block had inside in the first."""

    class Net(TextWithImages):
        def __init__(self) -> None:
            super().__init__()
            self.images.read = nn.Linear(12, 12)
            self.blocks = nn.ModuleList([Inner(), Inner()])

        def forward(self, x: Tensor, image: Tensor | None = None, ask: bool = False) -> Any:
            x = self.embed(x)
            if image is not None:
                x = x + self.images(image)
            if ask:
                return self.blocks[0](x, ask=True)[1]
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def __init__(self) -> None:
        super().__init__()
        self.net = self.Net()

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        inner = None if image is None else self.net(x, ask=True) * image.mean()
        out: Tensor = self.net(x, inner)
        return out


class Looped(TextWithImages):
    """The images come between the blocks."""

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if image is not None:
                x = x + self.images(image)
            x = block(x)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize(
    "kind",
    [
        TextWithImages, HandedOver, HandedOverInAList, HandedOverOnlyThen, Held, ReachesIn, ReachesInByName, Tied,
        Shared, Keeps,
        ReturnedIfAsked, ByAnotherMethod, AddedInside, PutIntoABox, RunByTheImages, ByPlace, ByItsWeights,
        CalledOtherwise, InTheClass, InTheFile, InAnotherClass, InTheContext, InADefault, Wrapped, InState, Twice,
        Looped,
    ],
)  # fmt: skip
def test_what_the_images_may_reach_stays(kind: type[nn.Module]) -> None:
    assert not free(kind())


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("phi4_multimodal", "model.embed_tokens_extend.image_embed.img_projection_up"),
        ("gemma3", "model.multi_modal_projector"),
    ],
)
def test_a_language_model_keeps_what_its_images_may_meet(family: str, part: str) -> None:
    graph = sc.analyze(build(family, "CAUSAL_LM"), tokens(2, 9))
    assert {layer.name.rpartition(".")[2] for layer in graph.layers if layer.prunable} <= {
        "gate_proj", "up_proj", "gate_up_proj"
    }  # fmt: skip
    assert graph.total_units == 2 * 2 * BY_NAME["intermediate_size"]  # in two blocks: gates, and what they gate
    assert any(f"`{part}` never ran" in layer.reason for layer in graph.layers)


@pytest.mark.parametrize("family", TEXTS_ALONE)
def test_sizes_of_other_parts_differ_from_the_texts_neurons_as_by_default(family: str) -> None:
    config = transformers.CONFIG_MAPPING[family]()
    parts = {name: getattr(config, name).to_dict() for name in type(config).sub_configs}
    neurons = parts.pop("text_config", config.to_dict())["intermediate_size"]
    sizes = [part[name] for part in parts.values() for name in BESIDE_TEXT if name in part]
    assert sizes
    assert neurons not in sizes
