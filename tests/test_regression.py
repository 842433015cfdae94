"""Files that an older version wrote still mean the same. `tests/regression/make.py` wrote them, with that version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import secateur as sc

FILES = Path(__file__).parent / "regression"
RUNS = ("tuned", "repaired")


def fixed(*shape: int, step: int = 7919, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in (-1, 1) by integer arithmetic, so that they are the same bits on every machine."""
    count = int(torch.tensor(shape).prod())
    return ((torch.arange(count) * step % 2003 - 1001).to(dtype) / 1024).reshape(shape)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4),
    ).to(dtype)  # fmt: skip
    with torch.no_grad():
        for i, tensor in enumerate([*net.parameters(), *net.buffers()]):
            if tensor.is_floating_point():
                tensor.copy_(fixed(*tensor.shape, step=7919 + 2 * i, dtype=dtype) / max(tensor[0].numel(), 2) ** 0.5)
        for module in net:
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.abs_().add_(0.5)
                module.weight.abs_().add_(0.5)
    return net.eval()


def samples(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return fixed(24, 3, 8, 8, step=1009, dtype=dtype), torch.arange(24) % 4


class Evaluation:
    """How likely the targets are on average; a run stops when this has been asked `stop` times."""

    def __init__(self, stop: int | None) -> None:
        self.stop, self.asked = stop, 0

    def __call__(self, model: nn.Module) -> float:
        if self.asked == self.stop:
            raise RuntimeError("the run was stopped")
        self.asked += 1
        inputs, targets = samples(torch.float64)
        return float(torch.exp(-F.cross_entropy(model(inputs), targets)))


def pruned(run: str, checkpoint: Path | None, stop: int | None = None) -> tuple[Any, int]:
    """One of two runs, from its checkpoint if there is one; and how many steps were evaluated."""
    net, (inputs, targets) = network(torch.float64), samples(torch.float64)
    evaluation = Evaluation(stop)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def tune(model: nn.Module, step: int) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    schedule: dict[str, Any] = {"step": 0.125, "seed": 3}
    asked: dict[str, Any] = {"criterion": "taylor", "keep": {"macs": 0.4}, "repair": "ridge"}
    if run == "tuned":
        asked = {"remove": 0.5}
        schedule |= {"finetune": tune, "carry": [optimizer]}
    asked |= {"evaluate": evaluation, "checkpoint": checkpoint, "progress": False}
    try:
        from secateur.loop import Schedule
    except ImportError:  # the version that wrote the files takes each setting by itself
        return sc.prune(net, (inputs, targets), **asked, **schedule), evaluation.asked
    result = sc.prune(net, (inputs, targets), **asked, schedule=Schedule(**schedule))
    return result, evaluation.asked


def numbers(result: Any) -> dict[str, Any]:
    """What a run ended with, as JSON can hold it."""
    return {
        "rows": [[row.step, row.units, row.params, row.macs, row.metrics["overall"]] for row in result.history],
        "cuts": json.loads(result.plan.to_json())["cuts"],
        "weights": {name: tensor.tolist() for name, tensor in result.model.state_dict().items()},
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["cuts"] == expected["cuts"]
    assert found["rows"] == [pytest.approx(row) for row in expected["rows"]]
    assert found["weights"].keys() == expected["weights"].keys()
    for name, values in expected["weights"].items():
        torch.testing.assert_close(torch.tensor(found["weights"][name]), torch.tensor(values), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("run", RUNS)
def test_an_old_checkpoint_goes_on_and_ends_as_it_would_have(run: str, tmp_path: Path) -> None:
    expected = json.loads((FILES / f"{run}.json").read_text())
    path = tmp_path / "run.safetensors"
    shutil.copy(FILES / f"{run}.safetensors", path)
    result, asked = pruned(run, path)
    found, alone = numbers(result), numbers(pruned(run, None)[0])
    assert asked == len(expected["rows"]) - 3  # steps 0, 1 and 2 were done already
    if run == "repaired":
        # Today's repair draws other rows. Each step is repaired from the original's weights, so that what comes after
        # the file must be what a run without it gives. What lies in the file, and every size, is the older version's.
        assert [row[:4] for row in alone["rows"]] == [row[:4] for row in expected["rows"]]
        expected |= {"rows": [*expected["rows"][:3], *alone["rows"][3:]], "weights": alone["weights"]}
    else:
        assert_same(alone, expected)
    assert_same(found, expected)


def test_an_old_folder_loads_and_computes_what_its_weights_say() -> None:
    raw = load_file(FILES / "model" / "model.safetensors")
    inputs, _ = samples()

    def norm(x: Tensor, at: str) -> Tensor:
        return F.batch_norm(
            x, raw[f"{at}.running_mean"], raw[f"{at}.running_var"], raw[f"{at}.weight"], raw[f"{at}.bias"]
        )

    x = F.max_pool2d(norm(F.conv2d(inputs, raw["0.weight"], raw["0.bias"], padding=1), "1").relu(), 2)
    x = norm(F.conv2d(x, raw["4.weight"], padding=1), "5").relu().mean((2, 3))
    x = F.linear(F.linear(x, raw["9.weight"], raw["9.bias"]).relu(), raw["11.weight"], raw["11.bias"])

    fresh = network()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()  # the weights must come from the folder
    small = sc.load(FILES / "model", fresh).eval()
    torch.testing.assert_close(small(inputs), x, rtol=1e-5, atol=1e-6)
    assert small[0].out_channels < 8
    assert small[4].in_channels == small[0].out_channels == raw["0.weight"].shape[0]


def test_files_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FILES.rglob("*") if path.is_file()}
    assert max(sizes.values()) < 100_000, sizes
