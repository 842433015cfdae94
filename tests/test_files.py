"""Saving, loading, exporting; damaged and hostile files."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import secateur as sc
from constructs import CONSTRUCTS, build
from oracle import outputs, random_scores, relative_gap
from secateur.errors import FileFormatError, PlanError, SecateurError, SecateurWarning, VerificationError
from secateur.files.session import fixed_batch


def pruned(name: str, share: float = 0.5) -> tuple[nn.Module, object, nn.Module, sc.Plan]:
    model, example = build(name)
    graph = sc.analyze(model, example)
    plan = sc.plan(graph, random_scores(graph), remove=share)
    return model, example, sc.apply(model, plan), plan


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    _, example, small, _ = pruned(name)
    sc.save(small, tmp_path / "small")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["model.safetensors", "plan.json", "small"]
    fresh, _ = build(name, seed=1)
    again = sc.load(tmp_path / "small", fresh)
    assert relative_gap(outputs(again, example), outputs(small, example)) == 0
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in small.state_dict().items()}


def test_saving_replaces_and_twice_pruned_models_replay_both_plans(tmp_path: Path) -> None:
    _, example, small, _ = pruned("residual", 0.3)
    sc.save(small, tmp_path / "m")
    graph = sc.analyze(small, example)
    smaller = sc.apply(small, sc.plan(graph, random_scores(graph, 5), remove=0.4))
    sc.save(smaller, tmp_path / "m")
    again = sc.load(tmp_path / "m", build("residual")[0])
    assert relative_gap(outputs(again, example), outputs(smaller, example)) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


class Scaled(nn.Module):
    """Its scale is in no file, and stays in float32 whatever the weights are in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.linspace(0.1, 3.3, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(self.first(x).relu()).float() * self.scale).sin()


def test_a_buffer_that_no_file_holds_keeps_its_format(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Scaled().eval(), torch.randn(3, 8)
    graph = sc.analyze(model, x)
    small = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.4))
    for layer in (small.first, small.last):
        layer.bfloat16()
    sc.save(small, tmp_path / "small")
    again = sc.load(tmp_path / "small", Scaled()).eval()
    assert again.first.weight.dtype == torch.bfloat16
    assert torch.equal(again.scale, model.scale)
    assert torch.equal(again(x.bfloat16()), small(x.bfloat16()))


def test_bfloat16_comes_back_as_bfloat16(tmp_path: Path) -> None:
    model, example = build("residual")
    graph = sc.analyze(model, example)
    small = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.5)).to(torch.bfloat16)
    sc.save(small, tmp_path / "m")
    again = sc.load(tmp_path / "m", build("residual")[0])
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}


class Turned(nn.Module):
    """Complex factors in a buffer, as rotary embeddings have; and a number that is a view into a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)
        self.register_buffer("turn", torch.polar(torch.ones(1), torch.tensor([0.7])))
        self.register_buffer("scale", torch.rand(1, 3)[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x).relu()) * self.scale
        return torch.view_as_real(torch.view_as_complex(y) * self.turn)


def test_buffers_that_are_complex_or_views_come_back(tmp_path: Path) -> None:
    model, x = Turned().eval(), torch.rand(6, 3)
    small = sc.prune(model, (x, torch.arange(6) % 2), remove=0.3, recover=1, checkpoint=tmp_path / "run").model.eval()
    sc.save(small, tmp_path / "m")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = sc.load(tmp_path / "m", Turned()).eval()
    assert again.turn.is_complex()
    assert torch.equal(again(x), small(x))


def test_plans_round_trip_and_compare() -> None:
    *_, plan = pruned("transformer")
    assert sc.Plan.from_json(plan.to_json()) == plan
    *_, other = pruned("transformer", 0.3)
    assert other != plan
    assert "units leave" in str(plan)


def test_an_unpruned_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(sc.SecateurError, match="carries no plan"):
        sc.save(nn.Linear(2, 2), tmp_path / "m")
    with pytest.raises(sc.SecateurError, match=r"model first.*Fix: sc\.save\(result, path\)"):
        sc.save(tmp_path / "m", nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []


def test_the_wrong_model_is_named(tmp_path: Path) -> None:
    *_, small, _ = pruned("residual")
    sc.save(small, tmp_path / "m")
    with pytest.raises(FileFormatError, match="does not have"):
        sc.load(tmp_path / "m", nn.Sequential(nn.Linear(2, 2)))
    wide, _ = build("residual")
    wide.c = nn.Conv2d(16, 17, 3)
    with pytest.raises(FileFormatError, match=r"`c\.(weight|bias)` of shape"):
        sc.load(tmp_path / "m", wide)


def test_a_plan_for_another_model_is_refused() -> None:
    *_, plan = pruned("residual")
    with pytest.raises(PlanError, match="Fix"):
        sc.apply(build("concat")[0], plan)


@pytest.mark.parametrize("victim", ["model.safetensors", "plan.json"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
def test_truncated_files(victim: str, keep: float, tmp_path: Path) -> None:
    *_, small, _ = pruned("residual")
    sc.save(small, tmp_path / "m")
    content = (tmp_path / "m" / victim).read_bytes()
    (tmp_path / "m" / victim).write_bytes(content[: int(keep * len(content))])
    with pytest.raises(FileFormatError, match=victim):
        sc.load(tmp_path / "m", build("residual")[0])


def test_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    for name, words in (
        ("nowhere", "there is no folder"),
        ("empty", r"no plan\.json"),
        ("file", "is a file; a model is"),
    ):
        with pytest.raises(FileFormatError, match=words):
            sc.load(tmp_path / name, build("residual")[0])


def test_an_edited_plan_is_noticed(tmp_path: Path) -> None:
    *_, small, _ = pruned("residual")
    sc.save(small, tmp_path / "m")
    path = tmp_path / "m" / "plan.json"
    data = json.loads(path.read_text())
    data["plans"][0]["cuts"]["c.weight"]["0"] = [0]
    path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match="do not belong together"):
        sc.load(tmp_path / "m", build("residual")[0])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_hostile_plans_are_refused_or_fit(data: st.DataObject) -> None:
    """Whatever stands in a plan, reading and applying it ends in a named error or a model that was verified."""
    model, example = build("residual")
    graph = sc.analyze(model, example)
    plan = json.loads(sc.plan(graph, random_scores(graph), remove=0.5).to_json())
    key = data.draw(st.sampled_from(sorted(plan)))
    junk = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    )
    plan[key] = data.draw(junk)
    try:
        small = sc.apply(model, sc.Plan.from_json(json.dumps(plan)), example=example)
    except sc.SecateurError:
        return
    assert outputs(small, example)[0].shape == (2, 5)


@pytest.mark.parametrize("name", ["residual", "transformer", "squeeze-excite", "channel shuffle"])
def test_onnx_equals_torch(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    _, example, small, _ = pruned(name)
    path = sc.export(small, tmp_path / "m.onnx", example)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: example.numpy()})
    assert relative_gap([torch.from_numpy(found)], outputs(small, example)) < 1e-4
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_exports_are_compared_without_the_errors_of_a_gpu(tmp_path: Path) -> None:
    """TF32 has errors of 1e-3, so that every export of a model on a GPU would be refused."""
    seen = set()

    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                seen.add((torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()))
            return super().forward(x)

    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        sc.export(Net(2, 3), tmp_path / "m.onnx", torch.rand(2, 2))
        assert seen == {(False, "highest")}
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before[1])
    assert torch.backends.cudnn.allow_tf32 is before[0]


def test_what_torch_cannot_translate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        try:
            raise AttributeError("'tuple' object has no attribute 'dtype'")
        except AttributeError as error:
            raise RuntimeError("pages " * 1000) from error

    monkeypatch.setattr("torch.onnx.export", fail)
    with pytest.raises(sc.SecateurError, match=r"cannot translate Linear \(AttributeError: 'tuple'.*\.pt2") as caught:
        sc.export(torch.nn.Linear(2, 3), tmp_path / "m.onnx", torch.rand(1, 2))
    assert len(str(caught.value)) < 400
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_onnx_runtime_cannot_run_every_precision(kind: torch.dtype, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    x = torch.rand(2, 3, 8, 8)
    name = str(kind).removeprefix("torch.")
    with pytest.raises(VerificationError, match=rf"Fix: export model\.float\(\).*{name}"):
        sc.export(net.to(kind), tmp_path / "m.onnx", x.to(kind))
    assert list(tmp_path.iterdir()) == []
    assert sc.export(net.float(), tmp_path / "m.onnx", x).exists()


class Fixed(nn.Module):
    """A forward that knows how many samples there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(2, 4)


class Many(nn.Module):
    """A forward that takes any number of inputs after the first."""

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return x + sum(more)


def test_onnx_says_when_the_batch_is_fixed(tmp_path: Path) -> None:
    with pytest.warns(SecateurWarning, match="takes batches of 2 only"):
        path = sc.export(Fixed(), tmp_path / "fixed.onnx", torch.rand(2, 4))
    assert fixed_batch(path) == 2


def test_onnx_with_any_number_of_inputs_takes_any_batch(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecateurWarning)
        path = sc.export(Many(), tmp_path / "many.onnx", (torch.rand(2, 4), torch.rand(2, 4), torch.rand(2, 4)))
    assert fixed_batch(path) is None
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = {item.name: np.full((7, 4), i, np.float32) for i, item in enumerate(session.get_inputs())}
    assert (session.run(None, feeds)[0] == 3).all()


def test_torch_export_equals_torch(tmp_path: Path) -> None:
    _, example, small, _ = pruned("residual")
    path = sc.export(small, tmp_path / "m.pt2", example)
    program = torch.export.load(path)
    assert relative_gap([program.module()(example)], outputs(small, example)) < 1e-4


def test_other_endings_are_refused(tmp_path: Path) -> None:
    _, example, small, _ = pruned("residual")
    with pytest.raises(sc.SecateurError, match=r"\.onnx or \.pt2"):
        sc.export(small, tmp_path / "m.tflite", example)


# -- the same names and shapes, another network ------------------------------------------------------------------------
class Functional(nn.Module):
    """What it computes stands in the forward alone, where no attribute shows it."""

    def __init__(self, act: str = "relu", scale: float = 1.0, strides: tuple[int, int] = (2, 1)) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.c = nn.Linear(8, 5)
        self.kind = {"relu": nn.functional.relu, "gelu": nn.functional.gelu}[act]
        self.scale, self.strides, self.calls = scale, strides, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen = tuple(x.shape)
        x = nn.functional.conv2d(x, self.a.weight, self.a.bias, stride=self.strides[0], padding=1)
        x = nn.functional.conv2d(self.kind(x), self.b.weight, self.b.bias, stride=self.strides[1], padding=1)
        return self.c(self.kind(x).mean((2, 3))) * self.scale


def layered(strides: tuple[int, int] = (2, 1), act: nn.Module | None = None, eps: float = 1e-5) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, strides[0], 1), nn.BatchNorm2d(8, eps), nn.ReLU() if act is None else act,
        nn.Dropout(0.3), nn.Conv2d(8, 8, 3, strides[1], 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip


def halved(model: nn.Module, example: object, folder: Path) -> nn.Module:
    graph = sc.analyze(model, example)
    small = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.5))
    sc.save(small, folder)
    return small.eval()


def test_moved_strides_are_refused_by_name(tmp_path: Path) -> None:
    halved(layered(), torch.rand(2, 3, 8, 8), tmp_path / "m")
    with pytest.raises(FileFormatError, match=r"`0\.stride` was 2 and is 1; `4\.stride` was 1 and is 2.*Fix"):
        sc.load(tmp_path / "m", layered((1, 2)))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda: layered(act=nn.GELU()), "`2` was ReLU and is GELU"),
        (lambda: layered(act=nn.LeakyReLU()), "`2` was ReLU and is LeakyReLU"),
        (lambda: layered(eps=1e-3), r"`1\.eps` was 1e-05 and is 0\.001"),
    ],
)
def test_other_layers_are_refused_by_name(other: object, what: str, tmp_path: Path) -> None:
    halved(layered(), torch.rand(2, 3, 8, 8), tmp_path / "m")
    with pytest.raises(FileFormatError, match=what):
        sc.load(tmp_path / "m", other())  # type: ignore[operator]


def test_what_is_idle_in_evaluation_may_differ(tmp_path: Path) -> None:
    x = torch.rand(2, 3, 8, 8)
    net, other = layered(), layered(act=nn.ReLU(inplace=True))
    net[0].order, other[0].order = 1, 2  # a tag of the user's own
    small = halved(net, x, tmp_path / "m")
    other[1].momentum, other[3] = 0.5, nn.Identity()
    other[6] = nn.AdaptiveAvgPool2d((1, 1))
    assert torch.equal(sc.load(tmp_path / "m", other).eval()(x), small(x))


@pytest.mark.parametrize("other", [{"act": "gelu"}, {"scale": 1.5}, {"strides": (1, 2)}])
def test_another_forward_is_refused(other: dict[str, object], tmp_path: Path) -> None:
    x = torch.rand(2, 3, 8, 8)
    small = halved(Functional(), x, tmp_path / "m")
    with pytest.raises(FileFormatError, match=r"output on fixed inputs differs.*Fix"):
        sc.load(tmp_path / "m", Functional(**other))  # type: ignore[arg-type]
    used = Functional()
    used(x)  # it counts its calls and remembers a shape, which must not matter
    assert torch.equal(sc.load(tmp_path / "m", used).eval()(x), small(x))


class Both(nn.Module):
    """Two inputs by name, one of them whole numbers."""

    def __init__(self, sign: int = 1) -> None:
        super().__init__()
        self.table, self.mid, self.out = nn.Embedding(10, 6), nn.Linear(6, 8), nn.Linear(8, 3)
        self._sign = sign

    def forward(self, words: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self._sign * self.mid(self.table(words).mean(1) + more)))


def test_several_inputs_are_compared_too(tmp_path: Path) -> None:
    example = {"words": torch.randint(0, 10, (2, 7)), "more": torch.rand(2, 6)}
    halved(Both(), example, tmp_path / "m")
    sc.load(tmp_path / "m", Both())
    with pytest.raises(FileFormatError, match="output on fixed inputs"):
        sc.load(tmp_path / "m", Both(-1))


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_wrapped_models_are_known_by_what_they_wrap(wrap: object, tmp_path: Path) -> None:
    x = torch.rand(2, 3, 8, 8)
    small = halved(layered(), x, tmp_path / "m")
    sc.save(wrap(small), tmp_path / "w")  # type: ignore[operator]
    for folder in ("m", "w"):
        assert torch.equal(sc.load(tmp_path / folder, wrap(layered())).eval()(x), small(x))  # type: ignore[operator]
    with pytest.raises(FileFormatError, match="was ReLU and is GELU"):
        sc.load(tmp_path / "w", wrap(layered(act=nn.GELU())))  # type: ignore[operator]


def test_heads_are_settings_too(tmp_path: Path) -> None:
    def make(heads: int) -> nn.Module:
        return nn.Sequential(
            nn.TransformerEncoderLayer(8, heads, 16, batch_first=True), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)
        )

    graph = sc.analyze(make(2), torch.rand(1, 5, 8))
    net = make(2)
    small = sc.apply(net, sc.plan(graph, random_scores(graph), remove=0.3))
    sc.save(small, tmp_path / "m")
    sc.load(tmp_path / "m", make(2))
    with pytest.raises(FileFormatError):
        sc.load(tmp_path / "m", make(4))


def test_a_model_loaded_and_saved_again_is_still_known(tmp_path: Path) -> None:
    halved(Functional(), torch.rand(2, 3, 8, 8), tmp_path / "m")
    sc.save(sc.load(tmp_path / "m", Functional()), tmp_path / "again")
    with pytest.raises(FileFormatError, match="output on fixed inputs"):
        sc.load(tmp_path / "again", Functional("gelu"))


def test_a_random_forward_is_let_through(tmp_path: Path) -> None:
    class Noisy(Functional):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.rand_like(x))

    graph = sc.analyze(Functional(), torch.rand(2, 3, 8, 8))
    plan = sc.plan(graph, random_scores(graph), remove=0.5)
    small = sc.apply(Functional(), plan)
    small.__class__ = Noisy
    sc.save(small, tmp_path / "m")
    sc.load(tmp_path / "m", Noisy())


def replace_fingerprint(folder: Path, fingerprint: object) -> None:
    """As if the file had been written with another one, or, for None, before there was any."""
    path, weights = folder / "plan.json", folder / "model.safetensors"
    data = json.loads(path.read_text())
    assert data.pop("fingerprint")
    path.write_text(json.dumps(data if fingerprint is None else {**data, "fingerprint": fingerprint}))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    state = safetensors.torch.load_file(weights)
    safetensors.torch.save_file(state, weights, {"format": "secateur-model-1", "plan": digest})


def test_files_from_before_the_fingerprint_load(tmp_path: Path) -> None:
    x = torch.rand(2, 3, 8, 8)
    small = halved(layered(), x, tmp_path / "m")
    replace_fingerprint(tmp_path / "m", None)
    assert torch.equal(sc.load(tmp_path / "m", layered()).eval()(x), small(x))


@pytest.mark.parametrize("junk", [7, {}, [], {"settings": [], "answer": None}, {"settings": {}, "answer": 3}])
def test_what_is_no_fingerprint_is_refused(junk: object, tmp_path: Path) -> None:
    halved(layered(), torch.rand(2, 3, 8, 8), tmp_path / "m")
    replace_fingerprint(tmp_path / "m", junk)
    with pytest.raises(FileFormatError, match="fingerprint"):
        sc.load(tmp_path / "m", layered())


@pytest.mark.parametrize("answer", [{}, {"inputs": 3}, {"inputs": {"shape": [10**9, 10**9], "kind": "real"}}])
def test_a_hostile_fingerprint_does_no_harm(answer: object, tmp_path: Path) -> None:
    x = torch.rand(2, 3, 8, 8)
    small = halved(layered(), x, tmp_path / "m")
    replace_fingerprint(tmp_path / "m", {"settings": {"0": 3, "1": {"is": 4}}, "answer": answer})
    assert torch.equal(sc.load(tmp_path / "m", layered()).eval()(x), small(x))


class Otherwise(nn.Module):
    """Computes something else while it is exported, in its second output."""

    def __init__(self, other: float) -> None:
        super().__init__()
        self.fc, self.other = nn.Linear(4, 3), other

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        return y, y * self.other if torch.compiler.is_compiling() else y


def test_an_export_with_another_second_output_is_refused(tmp_path: Path) -> None:
    for other in (float("nan"), float("inf"), 2.0):
        for name in ("a.onnx", "a.pt2"):
            with pytest.raises(VerificationError, match="differs from PyTorch's"):
                sc.export(Otherwise(other).eval(), tmp_path / name, torch.rand(2, 4))
    assert not list(tmp_path.iterdir())


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(torch.arange(3) < 1, -torch.inf, self.fc(x))


class Branching(Masked):
    def forward(self, x: Tensor) -> Tensor | None:
        return self.fc(x) if float(x.sum()) > 0 else self.fc(-x)


class Silent(Masked):
    def forward(self, x: Tensor) -> None:
        self.fc(x)


def test_infinite_outputs_are_exported_as_they_are(tmp_path: Path) -> None:
    x, model = torch.rand(2, 4), Masked().eval()
    program = torch.export.load(sc.export(model, tmp_path / "a.pt2", x))
    assert torch.equal(program.module()(x)[:, 0], torch.full((2,), -torch.inf))


def test_models_that_torch_export_cannot_translate_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SecateurError, match=r"torch\.export cannot translate Branching"):
        sc.export(Branching().eval(), tmp_path / "a.pt2", torch.rand(2, 4))
    with pytest.raises(SecateurError, match="Silent returns no tensor"):
        sc.export(Silent().eval(), tmp_path / "a.pt2", torch.rand(2, 4))


def test_an_export_that_fails_leaves_no_hook_on_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6 does, whose hook then sees the buffers of every model of the process."""

    def fails(*args: object, **options: object) -> None:
        nn.modules.module.register_module_buffer_registration_hook(lambda module, name, buffer: None)
        raise RuntimeError("no")

    monkeypatch.setattr(torch.export, "export", fails)
    hooks = nn.modules.module._global_buffer_registration_hooks
    before = dict(hooks)
    with pytest.raises(sc.SecateurError, match="no"):
        sc.export(nn.Linear(2, 2), tmp_path / "model.pt2", torch.randn(1, 2))
    assert dict(hooks) == before
