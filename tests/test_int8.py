"""int8 files: what they compute, what stays in float32, and what is refused."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from benchmarks import latency_accuracy
from benchmarks.latency_rows import known
from command import fail, furnished, invoke, succeed
from secateur.data.images import read
from secateur.errors import DataError, SecateurError, VerificationError
from secateur.files import int8
from secateur.files.int8 import Int8, quantize
from secateur.files.session import Session
from secateur.models import build

IMAGES = torch.rand(24, 3, 16, 16, generator=torch.Generator().manual_seed(0))
COLOURS = nn.functional.interpolate(IMAGES[:, :, :2, :2], scale_factor=8)  # pictures that differ in the mean


def convolutional() -> nn.Module:
    """Batch norms, a residual sum, a depthwise convolution, two kinds of activations."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
            self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
            self.last = nn.Linear(16, 5)
            self.norm.running_var.uniform_(0.2, 2)
            self.norm.running_mean.normal_()

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.first(x)).relu()
            h = h + nn.functional.hardswish(self.deep(h))
            return self.last(h.amax((2, 3)) * 2)

    return Net().eval()


def operations(file: Path) -> list[str]:
    return [node.op_type for node in onnx.load(file).graph.node]


@pytest.mark.parametrize("data", [IMAGES, [(IMAGES[:8], None), (IMAGES[8:], None)]])
def test_an_int8_file_answers_almost_the_same_and_takes_any_batch(data: Any, tmp_path: Path) -> None:
    net = convolutional()
    small = sc.prune(net, (IMAGES, torch.arange(24) % 5), remove=0.25, progress=False).model
    file = sc.export(small, tmp_path / "m.onnx", IMAGES[:2], quantize=data)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    with torch.no_grad():
        expected = small(IMAGES)
    for batch in (1, 2, 24):
        found = Session(file)(IMAGES[:batch])
        assert (found - expected[:batch]).norm() < 0.1 * (expected[:batch] - expected.mean(0)).norm() + 1e-3
    assert not torch.equal(found, expected)


@pytest.mark.parametrize(("saturates", "kind"), [(False, np.int8), (True, np.uint8)])
def test_weights_have_eight_bits_with_one_scale_per_channel(
    saturates: bool, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "_saturates", lambda: saturates)
    monkeypatch.setattr(int8, "_ERROR", 1.0)  # which weights there are is another question than what comes of them
    file = sc.export(convolutional(), tmp_path / "m.onnx", IMAGES[:2], quantize=IMAGES)
    graph = onnx.load(file).graph
    held = {item.name: onnx.numpy_helper.to_array(item) for item in graph.initializer}
    kernels = [a for a in held.values() if a.dtype == kind and a.ndim == 4]
    assert sorted(a.shape for a in kernels) == [(16, 1, 3, 3), (16, 3, 3, 3)]
    assert sum(a.shape == (16,) and a.dtype == np.float32 and bool((a > 0).all()) for a in held.values()) >= 2
    assert "QuantizeLinear" in operations(file)
    assert "BatchNormalization" not in operations(file)
    assert file.stat().st_size < 1.5 * sc.export(convolutional(), tmp_path / "f.onnx", IMAGES[:2]).stat().st_size


class Wild(nn.Module):
    """A layer whose output has one huge channel: its range leaves the others a single step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.wild, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            self.wild.weight[0] *= 3e3
            self.last.weight[:, 0] = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.wild):
            x = layer(x)
        return self.last(x).mean((2, 3))


def test_layers_stay_in_float32_if_the_drop_demands_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Wild().eval()
    file = sc.export(net, tmp_path / "m.onnx", IMAGES[:2], quantize=IMAGES)
    note = Int8.of(file)
    assert note.layers == 3
    assert 1 <= len(note.left_out) <= 2
    assert set(note.left_out) <= {"first", "wild", "last"}
    held = {item.name: item.data_type for item in onnx.load(file).graph.initializer}
    in_float = [name for name in ("first", "wild", "last") if held.get(f"{name}.weight") == onnx.TensorProto.FLOAT]
    assert list(note.left_out) == in_float
    assert note.error <= 0.1
    assert relative_error(Session(file)(IMAGES), net(IMAGES)) == pytest.approx(note.error, rel=0.3)
    monkeypatch.setattr(int8, "_ERROR", 0.0)
    with pytest.raises(VerificationError, match=r"of its 3 layers stay in float32; no file is written.*more varied"):
        sc.export(net, tmp_path / "none.onnx", IMAGES[:2], quantize=IMAGES)
    assert not (tmp_path / "none.onnx").exists()


def test_what_the_quantiser_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise KeyError("some_tensor")

    monkeypatch.setattr("onnxruntime.quantization.quantize_static", broken)
    with pytest.raises(SecateurError, match=r"ONNX Runtime cannot quantise Wild \(KeyError: 'some_tensor'\)"):
        sc.export(Wild().eval(), tmp_path / "m.onnx", IMAGES[:2], quantize=IMAGES)
    assert not list(tmp_path.iterdir())


def merged(merge: Literal["sum", "mean"] = "mean") -> nn.Module:
    """Two convolutions and 130 outputs, of which 120 become two: most of their probabilities are far below 1/255."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(64, 130),
    ).eval()  # fmt: skip
    with torch.no_grad():
        seen = net[:6](COLOURS)
        net[6].weight.mul_(4 / net[6](seen).std(0).mean())
        net[6].bias.copy_(-(net[6].weight @ seen.mean(0)))
    return sc.specialize(net, {"few": range(5), "many": range(5, 120)}, COLOURS[:2], merge=merge).eval()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).square().mean().sqrt() / expected.std()).item()


@pytest.mark.parametrize("merge", ["sum", "mean"])
def test_outputs_that_were_merged_keep_their_small_probabilities(merge: Literal["sum", "mean"], tmp_path: Path) -> None:
    net = merged(merge)
    with torch.no_grad():
        expected = net(COLOURS)
        assert net.body(COLOURS).softmax(1).median() < 1 / 255
    file = sc.export(net, tmp_path / "m.onnx", IMAGES[:2], quantize=COLOURS)
    assert relative_error(Session(file)(COLOURS), expected) < 0.1
    graph = onnx.load(file).graph
    kinds = {output: node.op_type for node in graph.node for output in node.output}
    read = {node.op_type: kinds.get(node.input[0]) for node in graph.node}
    # The layers are in int8, and nothing from the softmax on is.
    assert read["Conv"] == read["Gemm"] == "DequantizeLinear"
    assert [read["MatMul"], read["Clip"], read["Log"]] == ["Softmax", "MatMul", "Clip"]
    assert kinds[graph.output[0].name] == "Log"
    note = Int8.of(file)
    assert (note.layers, note.left_out) == (3, ())


def test_a_softmax_inside_a_network_is_quantised_and_one_at_its_end_is_not(tmp_path: Path) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.gate, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).relu()
            h = h * self.gate(h).softmax(1)
            return self.last(h).mean((2, 3)).log_softmax(1)

    net = Gated().eval()
    file = sc.export(net, tmp_path / "m.onnx", IMAGES[:2], quantize=COLOURS)
    graph = onnx.load(file).graph
    readers = {tensor: node.op_type for node in graph.node for tensor in node.input}
    made = {node.op_type: readers.get(node.output[0]) for node in graph.node}
    assert (made["Softmax"], made["LogSoftmax"]) == ("QuantizeLinear", None)
    with torch.no_grad():
        assert relative_error(Session(file)(COLOURS), net(COLOURS)) < 0.1


def test_what_int8_does_not_suit_is_refused(tmp_path: Path) -> None:
    tokens = torch.rand(2, 6, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with pytest.raises(SecateurError, match=r"multiplies activations.*as attention does.*quantize_dynamic"):
        sc.export(layer, tmp_path / "a.onnx", tokens, quantize=tokens)
    with pytest.raises(SecateurError, match="no convolution and no linear layer"):
        sc.export(nn.ReLU(), tmp_path / "b.onnx", tokens, quantize=tokens)
    with pytest.raises(SecateurError, match=r"\.pt2.*int8.*a name that ends in \.onnx"):
        sc.export(convolutional(), tmp_path / "c.pt2", IMAGES[:2], quantize=IMAGES)
    with pytest.raises(DataError, match="quantize has no inputs"):
        sc.export(convolutional(), tmp_path / "d.onnx", IMAGES[:2], quantize=[])
    assert not list(tmp_path.iterdir())


def test_the_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sc.export(convolutional(), tmp_path / "m.onnx", IMAGES[:2])
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(SecateurError, match=r"pip install 'secateur\[export\]'"):
        quantize(file, IMAGES, "Net")


def test_prune_writes_int8_and_says_what_it_costs_and_gains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    place = furnished(tmp_path)
    job = [word for word in place.job if word not in ("--no-latency", "--no-report")]
    out = tmp_path / "small"
    result = invoke("prune", *job, "--out", out, "--keep-macs", 0.6, "--int8", "--threads", 1)
    assert result.exit_code == 0, result.stderr
    x, y = read(place.test, size=16).tensors()
    right = float((Session(out / "model.int8.onnx")(x).argmax(1) == y).float().mean())
    found = json.loads((out / "run.json").read_text())
    assert found["accuracy"]["int8"]["overall"] == pytest.approx(right)
    page, shown = (out / "report.html").read_text(), " ".join(result.stdout.split())
    was = found["accuracy"]["before"]["overall"]
    assert re.search(rf"accuracy, int8 │ {100 * was:.1f} % \([^│]*\) │ {100 * right:.1f} % \(", shown)
    assert "accuracy in int8" in page
    for batch in (1, 32):
        before, after = (found[side][f"int8_latency_{batch}"] for side in ("before", "after"))
        assert f"latency, batch {batch}, ONNX Runtime, int8, 1 thread" in shown
        assert f"{before / after:.2f}x as fast" in shown
        assert f"ONNX Runtime, int8, 1 thread, batch of {batch}" in page
    assert found["int8"]["layers"] == 3
    assert found["int8"]["in_float32"] == list(Int8.of(out / "model.int8.onnx").left_out)
    assert found["int8"]["error"] <= 0.1
    left = f"{3 - len(found['int8']['in_float32'])} of 3"
    assert re.search(rf"layers in int8 │ +│ {left} │", shown)
    assert f"layers in int8</th><td>{left}" in page
    said = fail("prune", "hf:nothing", "--text", "t.txt", "--remove", 0.1, "--int8", "--out", tmp_path / "t")
    assert "--int8 is for convolutional networks" in said


def test_a_refusal_of_int8_loses_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    place = furnished(tmp_path)
    job = [word for word in place.job if word not in ("--no-latency", "--no-report")]
    out = tmp_path / "small"
    command = ("prune", *job, "--out", out, "--keep-macs", 0.6, "--int8", "--threads", 1)
    assert invoke(*command).exit_code == 0
    assert (out / "model.int8.onnx").exists()
    monkeypatch.setattr(int8, "_ERROR", 0.0)
    result = invoke(*command)
    why = r"int8 changes the outputs of Sequential by \d+ % of their spread .* layers stay in float32"
    assert result.exit_code == 1
    assert re.search(f"error: model.int8.onnx was not written; everything else was. {why}", result.stderr)
    found = json.loads((out / "run.json").read_text())
    assert found["finished"]
    assert re.match(why, found["int8"]["refused"])
    assert {"params", "macs", "latency_1", "onnx_latency_1"} <= found["after"].keys()
    names = {Path(file).name for file in found["files"].values()}
    assert names == {"model", "history.csv", "model.onnx", "report.html"}
    assert all(Path(file).exists() for file in found["files"].values())
    assert not (out / "model.int8.onnx").exists()  # that of the earlier run would mislead
    assert "│ int8 │ │ refused │ not written │" in " ".join(result.stdout.split())
    assert re.search(f"int8</th><td>refused: {why}", (out / "report.html").read_text())
    printed = invoke(*command, "--json")
    assert printed.exit_code == 1
    assert re.match(why, json.loads(printed.stdout)["int8"]["refused"])


def test_export_takes_ranges_from_a_folder_of_photographs(tmp_path: Path) -> None:
    place, file = furnished(tmp_path), tmp_path / "m.onnx"
    found = succeed("export", *place.model, "--out", file, "--int8", place.train)
    assert found["int8"]["layers"] == 3
    assert found["int8"]["in_float32"] == list(Int8.of(file).left_out)
    x, _ = read(place.train, size=16).tensors()
    with torch.no_grad():
        error = relative_error(Session(file)(x), build(place.net, place.weights).eval()(x))
    assert found["int8"]["error"] == pytest.approx(error, rel=0.3)  # one sample at a time rounds as many do
    assert found["int8"]["error"] > 0
    said = invoke("export", *place.model, "--out", file, "--int8", place.train).stdout
    assert f"outputs change by {100 * found['int8']['error']:.1f} % of their spread" in said
    (tmp_path / "empty").mkdir()
    said = fail("export", *place.model, "--out", tmp_path / "n.onnx", "--int8", tmp_path / "empty")
    assert "there are no images in" in said
    said = fail("export", *place.model, "--out", tmp_path / "n.onnx", "--int8", tmp_path / "nowhere")
    assert "nowhere is not a folder. Fix: a folder of images." in said
    said = fail("export", *place.model, "--out", tmp_path / "n.pt2", "--int8", place.train)
    assert "a .pt2 file cannot compute in int8" in said


def test_the_benchmark_keeps_what_was_measured_before_int8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net, data = convolutional(), (IMAGES, torch.arange(24) % 5)
    graph = sc.analyze(net, IMAGES[:1])
    scores = sc.score(net, None, "weight", graph=graph)
    plan = sc.plan(graph, scores, remove=0.25)

    class Still:
        """A repair that changes nothing."""

        def examine(self, model: nn.Module) -> Any:
            return SimpleNamespace(model=model)

    todo = [(0.5, "latency"), (0.4, "cost")]
    draw = latency_accuracy.Round(0, todo, latency_accuracy.Scene(net, data, data), graph, scores, 0.9, Still())
    monkeypatch.setattr(latency_accuracy, "rounds", lambda *given: [draw])
    monkeypatch.setattr(latency_accuracy, "reach", lambda *given: (plan, 0.5, 0.01, 0.5))
    monkeypatch.setattr(
        latency_accuracy.sc, "latency", lambda *given, **more: SimpleNamespace(clock=lambda model: None)
    )

    def refuse(*given: Any) -> None:
        raise VerificationError("int8 changes too much.")

    monkeypatch.setattr(latency_accuracy, "in_int8", refuse)
    where = {"model": "resnet50", "data": "cats_dogs", "runtime": "onnxruntime", "batch": 1, "threads": 1}
    options = Namespace(**where, draws=(0, 1), allocations=(), int8=True, out=tmp_path, cache=None, seconds=1e9)
    latency_accuracy.measure(options)
    rows = [known(tmp_path, what=what) for what in ("accuracy", "int8")]
    assert [[row["allocation"] for row in side] for side in rows] == [["latency", "cost"]] * 2
    assert all("repaired" in row for row in rows[0])
    assert all(row["refused"] == "int8 changes too much." for row in rows[1])
    capsys.readouterr()
    latency_accuracy.tables(*rows)
    assert capsys.readouterr().out.count("| refused (1 draws) |") == 2


ATTENTION = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.layer(self.stem(x).flatten(2).mT).mean(1))

def make(classes=3):
    torch.manual_seed(0)
    return Net(classes)
"""


def test_attention_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = furnished(tmp_path)
    (tmp_path / "net.py").write_text(ATTENTION)
    job = [word for word in place.job if word not in ("--weights", place.weights)]
    monkeypatch.setattr("secateur.cli.prune.run_prune", lambda *a, **k: pytest.fail("the work began"))
    said = fail("prune", *job, "--out", tmp_path / "small", "--keep-macs", 0.6, "--int8")
    assert re.search(r"error: Net multiplies activations with each other .* as attention does", said)
    assert not (tmp_path / "small").exists()


def test_an_error_that_is_no_number_is_too_large() -> None:
    good, bad = [[np.array([1.0, 2.0])]], [[np.array([np.nan, 2.0])]]
    assert not int8._error(bad, good) <= 0.1
    assert not int8._error([good[0] + bad[0]], [good[0] + good[0]]) <= 0.1


def test_samples_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    x = torch.rand(4, 1, 8, 8)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    for bad, why in (
        (x.double(), "data type"),
        (torch.rand(4, 2, 8, 8), "dimensions"),
        ([((x, x), None)], "2 tensors"),
    ):
        with pytest.raises(DataError, match=f"quantize.*{why}"):
            sc.export(model, tmp_path / "a.onnx", x, quantize=bad)
    assert not list(tmp_path.iterdir())


def test_layers_are_compared_by_name_where_the_quantiser_puts_branches_in_another_order(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.last = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 6, 3), nn.Conv2d(10, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.cat([self.left(x), self.right(x)], 1)).mean((2, 3))

    x = torch.rand(3, 1, 8, 8)
    plain, made = tmp_path / "plain.onnx", tmp_path / "made.onnx"
    sc.export(Branches().eval(), plain, x)
    graph = onnx.load(plain)
    layers = [node.name for node in graph.graph.node if node.op_type == "Conv"]
    nodes = list(graph.graph.node)
    here, there = (i for i, node in enumerate(nodes) if node.name in layers[:2])
    nodes[here], nodes[there] = nodes[there], nodes[here]
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    weight = next(item for item in graph.graph.initializer if item.name == nodes[here].input[1])
    weight.CopyFrom(onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(weight), weight.name))  # a large error
    onnx.save(graph, made)
    feeds = [{graph.graph.input[0].name: one.numpy()} for one in x.split(1)]
    assert int8._by_added_error(plain, made, layers, feeds)[0] == layers[1]
