"""Nested inputs and outputs: every container that models take and return, with its type kept."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.nest import (
    describe,
    entries,
    leaves,
    map_leaves,
    map_tensors,
    select_samples,
    tensors_in,
    tensors_of_output,
)
from secateur.running.batches import batches, example_of
from secateur.running.devices import to_device
from secateur.running.sandbox import run, to_meta


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Item:
    x: Any
    y: Any = 3
    made: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.made = "once" if self.made is None else "twice"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict and holds more than its entries, as the tokenizers of transformers return."""

    def __init__(self, data: dict[str, Any], encodings: str = "") -> None:
        super().__init__(data)
        self.encodings = encodings


@dataclass
class Output(OrderedDict[str, Any]):
    """An ordered dict whose entries are fields as well, as the models of transformers return."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for name in ("logits", "hidden"):
            if getattr(self, name) is not None:
                OrderedDict.__setitem__(self, name, getattr(self, name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def __reduce__(self) -> Any:
        return type(self), (self.logits, self.hidden)


class Plain:
    def __init__(self, x: Any) -> None:
        self.x, self.name = x, "plain"


A, B, C = torch.arange(3.0), torch.arange(6).reshape(3, 2), torch.ones(3, 1, dtype=torch.float64)

NESTS: dict[str, Any] = {
    "tensor": A,
    "tuple": (A, B, 2),
    "list": [A, [B], None],
    "dict": {"a": A, "b": {"c": B}},
    "named tuple": Pair(A, Pair(B, "word")),
    "torch's own tuple": torch.sort(A),
    "ordered dict": OrderedDict(a=A, b=B),
    "default dict": defaultdict(list, a=A),
    "read-only mapping": MappingProxyType({"a": A, "b": B}),
    "encoding": Encoding({"ids": B, "mask": A}, "kept"),
    "model output": Output(A, (B, C)),
    "dataclass": Item(A, B),
    "frozen dataclass": Frozen([A, Frozen(B)]),
    "all": {"a": Pair([A, Item(B)], Frozen(Encoding({"x": (C,)})))},
}


def children(value: Any) -> list[Any]:
    """The items of a container, written out by type rather than by the walker."""
    if isinstance(value, Output | OrderedDict | dict | MappingProxyType | UserDict):
        return [value[key] for key in value]
    if isinstance(value, Item):
        return [value.x, value.y, value.made]
    if isinstance(value, Frozen):
        return [value.x]
    return list(value) if isinstance(value, tuple | list) else []


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for item in children(value) for t in flat(item)]


def same_form(a: Any, b: Any) -> bool:
    parts = children(a), children(b)
    return type(a) is type(b) and len(parts[0]) == len(parts[1]) and all(map(same_form, *parts))


@pytest.mark.parametrize("name", NESTS)
def test_all_tensors_in_order(name: str) -> None:
    expected = flat(NESTS[name])
    assert [id(t) for t in tensors_in(NESTS[name])] == [id(t) for t in expected] != []
    assert [id(leaf) for leaf in leaves(NESTS[name]) if isinstance(leaf, Tensor)] == [id(t) for t in expected]
    assert [id(t) for t in tensors_of_output(NESTS[name])] == [id(t) for t in expected]


@pytest.mark.parametrize("name", NESTS)
def test_a_map_keeps_types_and_all_else(name: str) -> None:
    nest, before = NESTS[name], [t.clone() for t in flat(NESTS[name])]
    doubled = map_tensors(lambda t: t * 2, nest)
    assert same_form(doubled, nest)
    assert all(torch.equal(new, 2 * old) for new, old in zip(flat(doubled), before, strict=True))
    assert all(torch.equal(new, old) for new, old in zip(flat(nest), before, strict=True)), "the original is untouched"
    summed = map_leaves(lambda a, b: a + b if isinstance(a, Tensor) else a, nest, doubled)
    assert same_form(summed, nest)
    assert all(torch.equal(new, 3 * old) for new, old in zip(flat(summed), before, strict=True))


def test_what_a_container_holds_besides_is_kept() -> None:
    assert map_tensors(torch.neg, NESTS["encoding"]).encodings == "kept"
    assert map_tensors(torch.neg, NESTS["default dict"]).default_factory is list
    item = map_tensors(torch.neg, Item(A))
    assert (item.y, item.made) == (3, "once")
    output = map_tensors(torch.neg, NESTS["model output"])
    assert torch.equal(output.logits, -A)
    assert output.logits is output["logits"]


def test_containers_without_tensors_stay_the_same_object() -> None:
    size, item, words = torch.Size([2, 3]), Item("a"), Pair("a", "b")
    made = map_tensors(torch.neg, {"size": size, "item": item, "words": words, "x": A})
    assert (made["size"], made["item"], made["words"]) == (size, item, words)
    assert made["item"] is item


@pytest.mark.parametrize("name", NESTS)
def test_samples_of_a_nest(name: str) -> None:
    index = torch.tensor([2, 0])
    for some, rows in ((index, [2, 0]), (slice(1), [0])):
        taken = select_samples(NESTS[name], some)
        assert same_form(taken, NESTS[name])
        assert all(torch.equal(t, whole[rows]) for t, whole in zip(flat(taken), flat(NESTS[name]), strict=True))


@pytest.mark.parametrize("name", NESTS)
def test_devices_and_copies_without_numbers(name: str) -> None:
    assert same_form(to_device(NESTS[name], torch.device("cpu")), NESTS[name])
    assert all(t.is_meta for t in flat(to_device(NESTS[name], torch.device("meta"))))
    assert all(t.is_meta == t.is_floating_point() for t in flat(to_meta(NESTS[name])))


def test_leaves_may_be_anything() -> None:
    assert map_leaves(str, {"a": [1, (2, None)]}) == {"a": ["1", ("2", "None")]}
    assert entries(3) is None
    assert tensors_in(Plain(A)) == []
    assert tensors_of_output(Plain([A])) == [A]
    assert tensors_of_output(3) == []


def test_descriptions() -> None:
    assert describe(Encoding({"ids": B})) == "{ids: (3, 2) int64}"
    assert describe(Pair(A, Item(C, "w"))) == "((3,) float32, {x: (3, 1) float64, y: 'w', made: 'once'})"


class Reader(nn.Module):
    """Takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.out = nn.Embedding(7, 6), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Output:
        hidden = self.hidden(self.table(ids)).relu()
        return Output(self.out((hidden * mask[..., None]).sum(1)), hidden)


def test_a_mapping_as_example_and_a_model_output(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    net = Reader().eval()
    inputs = Encoding({"ids": torch.randint(7, (6, 5)), "mask": torch.ones(6, 5)})
    data = (inputs, torch.arange(6) % 3)
    example = example_of(net, data)
    assert type(example) is Encoding
    assert example["ids"].shape == (1, 5)
    sizes = [len(x["ids"]) for x, _ in batches(data, 4)]
    assert sizes == [4, 2]
    assert torch.equal(run(net, inputs).logits, net(**inputs).logits)
    result = sc.prune(net, data, remove=0.5, progress=False, repair=None)
    assert result.model(**inputs).logits.shape == (6, 3)
    assert result.model.table.embedding_dim < 6  # the hidden layer is an output itself, so it stays
