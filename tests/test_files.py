"""Saving, loading, exporting; damaged and hostile files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import secateur as sc
from constructs import CONSTRUCTS, build
from oracle import outputs, random_scores, relative_gap
from secateur.errors import FileFormatError, PlanError, SecateurWarning
from secateur.pruning.export import fixed_batch


def pruned(name: str, share: float = 0.5) -> tuple[nn.Module, object, nn.Module, sc.Plan]:
    model, example = build(name)
    graph = sc.analyze(model, example)
    plan = sc.plan(graph, random_scores(graph), remove=share)
    return model, example, sc.apply(model, plan), plan


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    _, example, small, _ = pruned(name)
    sc.save(tmp_path / "small", small)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["model.safetensors", "plan.json", "small"]
    fresh, _ = build(name, seed=1)
    again = sc.load(tmp_path / "small", fresh)
    assert relative_gap(outputs(again, example), outputs(small, example)) == 0
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in small.state_dict().items()}


def test_saving_replaces_and_twice_pruned_models_replay_both_plans(tmp_path: Path) -> None:
    _, example, small, _ = pruned("residual", 0.3)
    sc.save(tmp_path / "m", small)
    graph = sc.analyze(small, example)
    smaller = sc.apply(small, sc.plan(graph, random_scores(graph, 5), remove=0.4))
    sc.save(tmp_path / "m", smaller)
    again = sc.load(tmp_path / "m", build("residual")[0])
    assert relative_gap(outputs(again, example), outputs(smaller, example)) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_bfloat16_comes_back_as_bfloat16(tmp_path: Path) -> None:
    model, example = build("residual")
    graph = sc.analyze(model, example)
    small = sc.apply(model, sc.plan(graph, random_scores(graph), remove=0.5)).to(torch.bfloat16)
    sc.save(tmp_path / "m", small)
    again = sc.load(tmp_path / "m", build("residual")[0])
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}


def test_plans_round_trip_and_compare() -> None:
    *_, plan = pruned("transformer")
    assert sc.Plan.from_json(plan.to_json()) == plan
    *_, other = pruned("transformer", 0.3)
    assert other != plan
    assert "units leave" in str(plan)


def test_an_unpruned_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(sc.SecateurError, match="carries no plan"):
        sc.save(tmp_path / "m", nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []


def test_the_wrong_model_is_named(tmp_path: Path) -> None:
    *_, small, _ = pruned("residual")
    sc.save(tmp_path / "m", small)
    with pytest.raises(FileFormatError, match="does not have"):
        sc.load(tmp_path / "m", nn.Sequential(nn.Linear(2, 2)))
    wide, _ = build("residual")
    wide.c = nn.Conv2d(16, 17, 3)
    with pytest.raises(FileFormatError, match=r"`c\.(weight|bias)` of shape"):
        sc.load(tmp_path / "m", wide)


def test_a_plan_for_another_model_is_refused() -> None:
    *_, plan = pruned("residual")
    with pytest.raises(PlanError, match="Way out"):
        sc.apply(build("concat")[0], plan)


@pytest.mark.parametrize("victim", ["model.safetensors", "plan.json"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
def test_truncated_files(victim: str, keep: float, tmp_path: Path) -> None:
    *_, small, _ = pruned("residual")
    sc.save(tmp_path / "m", small)
    content = (tmp_path / "m" / victim).read_bytes()
    (tmp_path / "m" / victim).write_bytes(content[: int(keep * len(content))])
    with pytest.raises(FileFormatError, match=victim):
        sc.load(tmp_path / "m", build("residual")[0])


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"no plan\.json"):
        sc.load(tmp_path / "nowhere", build("residual")[0])


def test_an_edited_plan_is_noticed(tmp_path: Path) -> None:
    *_, small, _ = pruned("residual")
    sc.save(tmp_path / "m", small)
    path = tmp_path / "m" / "plan.json"
    data = json.loads(path.read_text())
    data["plans"][0]["cuts"]["c.weight"]["0"] = [0]
    path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match="do not belong together"):
        sc.load(tmp_path / "m", build("residual")[0])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
