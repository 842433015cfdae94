"""Which output means which folder."""

from __future__ import annotations

import pytest
from torchvision.models import ResNet50_Weights

from secateur.data import imagenet
from secateur.data.outputs import match, parse
from secateur.errors import DataError


def test_names_are_those_of_torchvision_and_wnids_are_sorted() -> None:
    assert [entry.name for entry in imagenet.entries()] == ResNet50_Weights.DEFAULT.meta["categories"]
    wnids = [entry.wnid for entry in imagenet.entries()]
    assert wnids == sorted(set(wnids))


def test_every_class_is_found_by_wnid_and_by_name_unless_ambiguous() -> None:
    for entry in imagenet.entries():
        assert imagenet.find(entry.wnid) == entry.index
        written = entry.name.upper().replace(" ", "_")
        if written in ("CRANE", "MAILLOT", "CARDIGAN"):
            with pytest.raises(DataError, match=rf"\b{entry.index} \({entry.wnid}"):
                imagenet.find(written)
        else:
            assert imagenet.find(written) == entry.index


def test_imagenette_by_wnid() -> None:
    # The ten classes of Imagenette, as its authors list them.
    known = {
        "n01440764": 0, "n02102040": 217, "n02979186": 482, "n03000684": 491, "n03028079": 497, "n03394916": 566,
        "n03417042": 569, "n03425413": 571, "n03445777": 574, "n03888257": 701,
    }  # fmt: skip
    assert match(sorted(known), 1000) == {wnid: (index,) for wnid, index in known.items()}


@pytest.mark.parametrize(
    ("classes", "count", "given", "found"),
    [
        (["tench", "GOLF_BALL"], 1000, [], {"tench": (0,), "GOLF_BALL": (574,)}),
        (["0", "217"], 1000, [], {"0": (0,), "217": (217,)}),
        (["0", "1", "10", "2"], 11, [], {"0": (0,), "1": (1,), "10": (10,), "2": (2,)}),  # not the order of text
        (["a", "b", "c"], 3, [], {"a": (0,), "b": (1,), "c": (2,)}),
        (["cat", "dog"], 1000, ["dog=151-153", "cat=282,tabby"], {"cat": (282, 281), "dog": (151, 152, 153)}),
        (["a=b", "c"], 4, ["a=b=3", "c=0..1"], {"a=b": (3,), "c": (0, 1)}),
    ],
)
def test_matches(classes, count, given, found) -> None:
    assert match(classes, count, given) == found


@pytest.mark.parametrize(
    ("classes", "count", "given", "says"),
    [
        (
            ["cat", "dog"],
            1000,
            [],
            "no ImageNet name.*cat, dog.*Fix: say which outputs mean them, such as outputs=.'cat=",
        ),
        (["springer"], 1000, [], "English springer"),
        (["crane"], 1000, [], r"134 \(n02012849.*517 \(n03126707"),
        (["a", "b"], 3, [], "2 class folders .* 3 outputs"),
        (["a", "b"], 9, ["a=1"], "without outputs: b"),
        (["a", "b"], 9, ["a=1", "c=2"], "no class folder 'c'"),
        (["a", "b"], 9, ["a=1", "b=1"], "output 1 is claimed by 'a' and by 'b'"),
        (["a"], 1000, ["a=281,tabby"], "output 281 is claimed"),
        (["a"], 9, ["a=9"], "output 9 .* does not exist: the model has 9"),
        (["a"], 9, ["a=5-3"], "runs backwards"),
        (["a"], 9, ["a=5-30000000000"], "goes beyond the model's 9 outputs"),
        (["a"], 9, ["a=tench"], "'tench' is no output of this model"),
        (["a"], 9, ["a"], "not of the form FOLDER=OUTPUTS"),
        (["a"], 9, ["a=1", "a=2"], "named twice"),
        (["1", "2"], 2, [], "output 2 .* does not exist"),
    ],
)
def test_refusals(classes, count, given, says) -> None:
    with pytest.raises(DataError, match=says):
        match(classes, count, given)


def test_named_outputs_are_matched_by_name_not_by_order() -> None:
    assert match(["cat", "dog"], 2, names=["dog", "cat"]) == {"cat": (1,), "dog": (0,)}
    assert match(["n01440764"], 2, names=["217", "Tench"]) == {"n01440764": (1,)}
    assert match(["217", "0"], 2, names=["0", "217"]) == {"217": (1,), "0": (0,)}  # names before numbers
    with pytest.raises(DataError, match=r"no output of this model: bird\. Its outputs are called dog, cat"):
        match(["bird", "cat"], 2, names=["dog", "cat"])
    with pytest.raises(DataError, match="several outputs of this model are called 'crane'"):
        match(["crane"], 2, names=["crane", "Crane"])
    assert match(["bird", "cat"], 2, ["bird=0", "cat=1"], names=["dog", "cat"]) == {"bird": (0,), "cat": (1,)}


def test_texts() -> None:
    assert parse("281-285") == (281, 282, 283, 284, 285)
    assert parse("n02102040, golf ball ,3") == (217, 574, 3)
