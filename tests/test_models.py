"""Models by name and by file; weights that fit, and weights that do not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import nn

import secateur as sc
from secateur.data.views import View
from secateur.errors import FileFormatError, ModelError
from secateur.models import Origin, build, open_model
from secateur.models.hub import hub_view
from secateur.models.origin import view_of
from secateur.models.weights import fill, read_weights

NET = """
from torch import nn

def make(width=8, classes=3):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)
    )

def number():
    return 3

def fails():
    raise KeyError("oops")
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:make"


def test_zoo_models_and_options() -> None:
    assert build("torchvision:squeezenet1_1?num_classes=7").classifier[1].out_channels == 7
    model = build("timm:test_resnet.r160_in1k?num_classes=5")
    assert model.num_classes == 5
    assert not model.training
    assert open_model("timm:test_resnet.r160_in1k").origin.view.size == 160
    assert open_model("torchvision:efficientnet_b1").origin.view.size == 240
    transformer = nn.Identity()
    transformer.image_size = 64  # as torchvision's have it
    assert view_of(transformer, "torchvision:vit_b_16").size == 64


def test_a_factory_in_a_file(net: str) -> None:
    model = build(f"{net}?width=5")
    assert isinstance(model, nn.Sequential)
    assert model[0].out_channels == 5


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("torchvision:resnet51", "torchvision has no model 'resnet51'. Did you mean .*torchvision:resnet50"),
        ("torchvision:fcn_resnet50", "torchvision has no model"),  # no classifier
        ("timm:resnett50", "timm has no model .*timm:resnet50"),
        ("resnet50", "is no model.*Did you mean torchvision:resnet50"),
        ("torchvision:resnet18?weights=DEFAULT", "weights is not an option. Fix: weights="),
        ("torchvision:resnet18?num_classes", "options look like"),
        ("torchvision:resnet18?wings=2", "could not be built"),
        ("absent.py:make", "there is no file absent.py"),
    ],
)
def test_unknown_models(spec: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        build(spec)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (":maek", "has no function or class 'maek'. Fix: .*net.py:make"),
        ("", "needs the name of a function or class"),
        (":number", "returned int, not a torch.nn.Module"),
        (":fails", "raised KeyError: 'oops'"),
        (":make?depth=3", "cannot be called with these options: .*'depth'"),
    ],
)
def test_factories_that_are_none(net: str, name: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        build(net.removesuffix(":make") + name)


def test_a_file_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(ModelError, match=r"bad\.py raised ZeroDivisionError when it was run"):
        build(f"{tmp_path / 'bad.py'}:make")


@pytest.mark.parametrize("wrapped", ["plain", "state_dict", "module", "_orig_mod", "half", "safetensors"])
def test_weights_from_files(net: str, tmp_path: Path, wrapped: str) -> None:
    source = build(net)
    state = {name: tensor + 1 for name, tensor in source.state_dict().items()}
    path = tmp_path / "w.pt"
    if wrapped == "safetensors":
        path = tmp_path / "w.safetensors"
        safetensors.torch.save_file(state, path)
    elif wrapped == "half":
        torch.save({k: v.half() for k, v in state.items()}, path)
    else:
        prefixed = {f"{wrapped}.{k}": v for k, v in state.items()}
        kinds = {"plain": state, "state_dict": {"state_dict": state, "epoch": 3}}
        torch.save(kinds.get(wrapped, prefixed), path)
    model = build(net, path)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        expected = state[name].half().float() if wrapped == "half" else state[name]
        assert torch.equal(tensor, expected)


def test_a_model_with_a_part_called_module_takes_its_own_weights(tmp_path: Path) -> None:
    net = nn.Sequential()
    net.module = nn.Linear(2, 2)
    torch.save({name: tensor + 1 for name, tensor in net.state_dict().items()}, tmp_path / "w.pt")
    before = net.module.weight.detach().clone()
    fill(net, tmp_path / "w.pt")
    assert torch.equal(net.module.weight, before + 1)


def test_a_hub_that_breaks_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("transformers.utils.hub")

    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("We couldn't connect")

    monkeypatch.setattr(hub, "cached_file", offline)
    monkeypatch.setattr("secateur.models.hub._answers", lambda source: True)
    net = nn.Sequential()
    net.config = SimpleNamespace(image_size=8)
    with pytest.raises(ModelError, match="the hub does not give it: We couldn't connect"):
        hub_view("hf:somebody/some-model", net)


def test_weights_that_do_not_fit_are_named(net: str, tmp_path: Path) -> None:
    torch.save(build(f"{net}?classes=4").state_dict(), tmp_path / "four.pt")
    with pytest.raises(
        FileFormatError, match=r"`4.weight` has shape \(4, 8\), the model needs \(3, 8\).*num_classes=4"
    ):
        build(net, tmp_path / "four.pt")
    state = build(net).state_dict()
    state["other"] = state.pop("0.bias")
    torch.save(state, tmp_path / "keys.pt")
    with pytest.raises(FileFormatError, match=r"has no `0.bias`; the model has no `other`"):
        build(net, tmp_path / "keys.pt")
    with pytest.raises(FileFormatError, match=r"no weights file .*absent.pt. Fix: the path of"):
        build(net, tmp_path / "absent.pt")
    with pytest.raises(FileFormatError, match=r"no weights file .*key.pt. Fix: .*keys.pt"):
        build(net, tmp_path / "key.pt")
    with pytest.raises(ModelError, match=r"there is no file .*nett.py. Fix: .*net.py:make"):
        build(net.replace("net.py", "nett.py") + ("" if ":" in net.rsplit("/", 1)[1] else ":make"))


def test_pickled_modules_and_rubbish_are_refused(net: str, tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(FileFormatError, match=r"runs no code from files. Fix: torch.save"):
        build(net, tmp_path / "module.pt")
    (tmp_path / "rubbish.pt").write_bytes(b"rubbish")
    with pytest.raises(FileFormatError, match=r"rubbish\.pt"):
        build(net, tmp_path / "rubbish.pt")
    (tmp_path / "rubbish.safetensors").write_bytes(b"rubbish")
    with pytest.raises(FileFormatError, match="not a safetensors file"):
        build(net, tmp_path / "rubbish.safetensors")


def pruned(model: nn.Module) -> nn.Module:
    graph = sc.analyze(model, torch.zeros(1, 3, 32, 32))
    return sc.apply(model, sc.plan(graph, sc.score(model, None, "weight", graph=graph), remove=0.5))


def test_a_saved_folder_opens_by_what_it_was_cut_from(tmp_path: Path) -> None:
    spec = "torchvision:squeezenet1_1?num_classes=7"
    small = pruned(build(spec))
    origin = Origin(spec, View(32, "squash"), ("a", "b"))
    sc.save(small, tmp_path / "run" / "model", about={"origin": origin.to_dict()})
    opened = open_model(str(tmp_path / "run"))
    assert opened.origin == origin
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(opened.model(x), small.eval()(x))


def test_merged_outputs_open_again(net: str, tmp_path: Path) -> None:
    whole = open_model(f"{net}?classes=5")
    groups = {"low": (0, 1), "high": (2, 4)}
    narrow = sc.specialize(whole.model, groups, torch.zeros(1, 3, 8, 8)).eval()
    origin = whole.origin.specialized(groups, 5)
    sc.save(narrow, tmp_path / "m", about={"origin": origin.to_dict()})
    x = torch.rand(2, 3, 8, 8)
    again = open_model(str(tmp_path / "m"), original=f"{net}?classes=5")
    assert torch.equal(again.model(x), narrow(x))
    assert again.origin.classes == ("low", "high")
    # What the groups mean, from the whole model.
    shares = whole.model(x)[:, [0, 1, 2, 4]].softmax(1)
    assert torch.allclose(again.model(x).exp(), torch.stack([shares[:, :2].sum(1), shares[:, 2:].sum(1)], 1))


def test_a_saved_folder_runs_no_file_unless_told_to(net: str, tmp_path: Path) -> None:
    small = pruned(build(net))
    sc.save(small, tmp_path / "m", about={"origin": Origin(net).to_dict()})
    with pytest.raises(ModelError, match=r"rebuilding it runs that file.*original="):
        open_model(str(tmp_path / "m"))
    assert open_model(str(tmp_path / "m"), original=net).model[0].out_channels == 4
    sc.save(small, tmp_path / "bare")
    with pytest.raises(ModelError, match=r"does not say which model it was cut from.*original="):
        open_model(str(tmp_path / "bare"))
    with pytest.raises(ModelError, match="holds its own weights"):
        build(str(tmp_path / "m"), "w.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no model was saved in it"):
        build(str(tmp_path / "empty"))


def test_a_damaged_origin_is_refused(net: str, tmp_path: Path) -> None:
    small = pruned(build(net))
    sc.save(small, tmp_path / "m", about={"origin": {"model": net}})
    with pytest.raises(FileFormatError, match="not described properly"):
        open_model(str(tmp_path / "m"), original=net)


def test_an_empty_file_of_weights_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_bytes(b"")
    with pytest.raises(FileFormatError, match=r"net\.pt is not a file of weights, or damaged: it is empty"):
        read_weights(tmp_path / "net.pt")
