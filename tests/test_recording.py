"""Recordings of relevance passes on a GPU give what the passes themselves give, or are not made."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from secateur.errors import DataError
from secateur.relevance import RelevancePass
from secateur.relevance._cuda_graphs import Recording, _shape_of
from secateur.relevance.starts import starter
from secateur.running.capture import as_if_recording


def test_one_thread_after_the_other_tells_models_that_they_are_recorded() -> None:
    asked, entered = torch.cuda.is_current_stream_capturing, threading.Event()

    def other() -> None:
        entered.set()
        with as_if_recording():
            left.wait(1)

    left, thread = threading.Event(), threading.Thread(target=other)
    with as_if_recording():
        thread.start()
        entered.wait(5)
        time.sleep(0.05)
    left.set()
    thread.join()
    assert torch.cuda.is_current_stream_capturing is asked


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BATCHES = 7


class Block(nn.Module):
    """Residual sum, squeeze-and-excitation, in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.squeeze = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm(self.conv(x)))
        y = y * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(y, 1)))
        return F.relu(x + y)


class Tokens(nn.Module):
    """Embedding, attention, layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 16), nn.LayerNorm(16), nn.Linear(16, 5)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.norm(x).mean(1))


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), Block(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 7 * 7, 5),
    ).eval()  # fmt: skip
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return net.cuda()


def tokens() -> nn.Module:
    torch.manual_seed(0)
    return Tokens().eval().cuda()


class Answering(nn.Module):
    """A language model of transformers whose last token answers."""

    def __init__(self, device: str) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=11, use_cache=False)
        torch.manual_seed(0)
        self.net = transformers.LlamaForCausalLM(config).eval().to(device)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.net(input_ids, attention_mask=attention_mask).logits[:, -1, :5]


def llama() -> nn.Module:
    return Answering("cuda")


def pictures(number: int) -> Tensor:
    return torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(number)).cuda()


def sentences(number: int) -> Tensor:
    return torch.randint(11, (6, 9), generator=torch.Generator().manual_seed(number)).cuda()


def padded(number: int) -> dict[str, Tensor]:
    ids = sentences(number)
    lengths = 1 + (torch.arange(6, device=ids.device) + number) % 9
    return {"input_ids": ids, "attention_mask": (torch.arange(9, device=ids.device) < lengths[:, None]).long()}


def targets(number: int) -> Tensor:
    return torch.randint(5, (6,), generator=torch.Generator().manual_seed(100 + number)).cuda()


def afresh(
    net: nn.Module, x: Any, y: Tensor, composite: str | None = None
) -> tuple[RelevancePass, Tensor, list[Tensor | None]]:
    """One batch by a pass that has seen no other, so that nothing was recorded."""
    relevance = RelevancePass(net, composite)
    output, heat = relevance.run(x, starter(y))
    assert relevance._recorder.recording is None
    return relevance, output, heat


@on_gpu
@pytest.mark.parametrize(
    ("make", "data", "composite", "recorded"),
    [
        (convolutional, pictures, None, True),
        (tokens, sentences, "alpha1beta0", False),
        (tokens, sentences, None, True),
        (llama, sentences, None, True),
        (llama, padded, None, True),
    ],
)
def test_replays_give_what_a_pass_gives(make, data, composite, recorded):
    net = make()
    long, sums = RelevancePass(net, composite), {}
    for number in range(BATCHES):
        x, y = data(number), targets(number)
        output, heat = long.run(x, starter(y))
        fresh, expected, hot = afresh(net, x, y, composite)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(heat, hot, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
        for name, units in fresh.units.items():
            sums[name] = sums.get(name, 0) + units
    # Layers in which relevance got stuck ask the device at every batch, so that they cannot be recorded.
    assert isinstance(long._recorder.recording, Recording) == recorded, long._recorder.refusal
    assert recorded or "stuck" in long._recorder.refusal
    assert long.units.keys() == sums.keys()
    for name, units in long.units.items():
        torch.testing.assert_close(units, sums[name], rtol=1e-3, atol=1e-5)
    assert long.samples == 6 * BATCHES
    assert long.conservation().start == pytest.approx(6 * BATCHES)


@on_gpu
def test_what_a_replay_returned_stays():
    net, long, kept = convolutional(), RelevancePass(convolutional()), []
    for number in range(BATCHES):
        output, (heat,) = long.run(pictures(number), starter(targets(number)))
        kept.append((output, output.clone(), heat, heat.clone()))
    assert long._recorder.recording is not None
    assert all(torch.equal(a, b) and torch.equal(c, d) for a, b, c, d in kept)
    assert all(torch.allclose(net(pictures(n)), kept[n][0], rtol=1e-3, atol=1e-4) for n in range(BATCHES))


@on_gpu
@pytest.mark.parametrize("change", ["write", "replace", "module", "shape"])
def test_changes_end_a_recording(change):
    net = convolutional()
    long = RelevancePass(net)
    for number in range(BATCHES):
        long.run(pictures(number), starter(targets(number)))
    assert long._recorder.recording is not None
    x, y = pictures(50), targets(50)
    if change == "write":
        with torch.no_grad():
            net[0].weight.mul_(-1)
    elif change == "replace":
        net[0].weight.data = torch.randn_like(net[0].weight)
    elif change == "module":
        net[3] = Block().eval().cuda()
    else:
        x, y = x[:4], y[:4]
    output, (heat,) = long.run(x, starter(y))
    _, expected, (hot,) = afresh(net, x, y)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(heat, hot, rtol=1e-3, atol=1e-5)


@on_gpu
def test_hooks_are_called_every_time():
    net, calls = convolutional(), []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    long = RelevancePass(net)
    for number in range(BATCHES):
        before = len(calls)
        long.run(pictures(number), starter(targets(number)))
        assert len(calls) > before
    assert long._recorder.recording is None


@on_gpu
def test_a_hook_that_comes_later_is_called():
    net, calls = convolutional(), []
    long = RelevancePass(net)
    for number in range(BATCHES):
        long.run(pictures(number), starter(targets(number)))
    assert long._recorder.recording is not None
    net[0].register_forward_hook(lambda *_: calls.append(1))
    long.run(pictures(0), starter(targets(0)))
    assert calls


class Asking(nn.Module):
    """Waits for the device, and decides by what it sees there."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if float(x.sum()) > 0 else self.other(x)


@on_gpu
def test_a_forward_that_waits_for_the_device_is_not_recorded():
    torch.manual_seed(0)
    net = Asking().eval().cuda()
    long = RelevancePass(net)
    for number in range(2 * BATCHES):
        sign = 1 if number < BATCHES else -1
        x, y = sign * torch.rand(6, 12, device="cuda"), targets(number)
        output, (heat,) = long.run(x, starter(y))
        _, expected, (hot,) = afresh(net, x, y)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(heat, hot, rtol=1e-3, atol=1e-5)
    assert long._recorder.recording is None
    assert "synchronizing" in long._recorder.refusal
    assert torch.cuda.get_sync_debug_mode() == 0


@on_gpu
def test_inputs_of_replays_are_checked_and_random_numbers_given_back():
    net = convolutional()
    long = RelevancePass(net)
    for number in range(BATCHES):
        long.run(pictures(number), starter(targets(number)))
    x = pictures(0)
    state = torch.cuda.get_rng_state()
    long.run(x, starter(targets(0)))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    x[0, 0, 0, 0] = float("nan")
    with pytest.raises(DataError, match="NaN"):
        long.run(x, starter(targets(0)))


@on_gpu
def test_a_loader_that_pins_memory_goes_on_meanwhile():
    data = torch.utils.data.TensorDataset(torch.cat([pictures(n).cpu() for n in range(4 * BATCHES)]))
    long, count = RelevancePass(convolutional()), 0
    for (x,) in torch.utils.data.DataLoader(data, 6, pin_memory=True, num_workers=1):
        long.run(x.cuda(non_blocking=True), starter(targets(count)))
        count += 1
    assert count == 4 * BATCHES
    assert long.samples == 6 * count
    assert long._recorder.recording is not None


@on_gpu
def test_watchers_see_every_batch():
    seen, counts = [], []
    long = RelevancePass(convolutional(), watch=lambda layer, relevance: seen.append(layer.name))
    for number in range(BATCHES):
        before = len(seen)
        long.run(pictures(number), starter(targets(number)))
        counts.append(len(seen) - before)
    assert min(counts) > 0
    assert long._recorder.recording is None


def test_nothing_is_recorded_on_the_cpu():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    long = RelevancePass(net)
    for _ in range(BATCHES):
        long.run(torch.rand(6, 4), starter(torch.arange(6) % 3))
    assert long._recorder.recording is None
    assert long.samples == 6 * BATCHES


def test_what_two_batches_have_in_common():
    x, ids = torch.rand(2, 3), torch.arange(4)
    assert _shape_of({"x": x, "more": (ids, [x])}) == _shape_of({"x": x + 1, "more": (ids + 1, [x])})
    assert _shape_of({"x": x}) != _shape_of({"y": x})
    assert _shape_of((x, x)) != _shape_of((x, x[:1]))
    assert _shape_of((x, x)) != _shape_of((x, x.double()))
    assert _shape_of((x, OrderedDict(flag=True))) is None, "a flag may mean other calls"


class Asked(TorchDispatchMode):
    """Counts how often a number is asked for, for which a GPU would have to be waited for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True])
def test_models_of_transformers_do_not_look_into_their_masks_while_they_are_recorded(masked):
    net, ids, asked = Answering("cpu"), torch.arange(12).view(2, 6) % 11, torch.cuda.is_current_stream_capturing
    mask = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]]) if masked else None
    with torch.no_grad():
        with Asked() as before:
            plain = net(ids, mask)
        with as_if_recording(), Asked() as told:
            recorded = net(ids, mask)
    assert before.count > 0
    assert told.count == 0
    torch.testing.assert_close(recorded, plain)
    assert torch.cuda.is_current_stream_capturing is asked
