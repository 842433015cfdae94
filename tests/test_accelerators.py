"""Each accelerator of a relevance pass can be switched off, and the numbers stay the same."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secateur.relevance import Accelerators, RelevancePass, _fusion, _kernels
from secateur.relevance.ledger import by_ones
from secateur.relevance.linear_maps import ConvMap, Geometry
from secateur.relevance.starts import starter

NONE = {"fusion": False, "script": False, "cuda_graphs": False, "kernels": False}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


class Block(nn.Module):
    """Residual sum, squeeze-and-excitation, in-place ReLUs, a strided and a grouped convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, groups=2), nn.BatchNorm2d(width)
        self.squeeze, self.plain = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 3, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x)), inplace=True)
        y = y * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(y, 1)))
        y = self.plain(y).relu_()
        y += x
        return y.relu_()


class Tokens(nn.Module):
    """A picture as tokens: attention, layer norm, a batch norm after a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.norm, self.inner, self.scale = nn.LayerNorm(12), nn.Linear(12, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2).reshape(len(x), -1, 12)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.scale(self.inner(self.norm(x).mean(1))).relu())


def convolutional() -> nn.Module:
    stem = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, Block(8), nn.ReLU(), Block(8), nn.Flatten(), nn.Linear(8 * 49, 5))


def run(make, device: str, accelerators: Accelerators, composite: str, biased: bool = True):
    """Batches of the same size, then one of another, then the first size again."""
    torch.manual_seed(0)
    net = make().eval().double().to(device)
    for module in net.modules():
        if not biased:  # without biases no output is positive unless a contribution is: no layer gets stuck
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
            continue
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            nn.init.normal_(module.running_mean, 0, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.bias, 0, 0.2)
    engine, found = RelevancePass(net, composite, accelerators=accelerators), []
    for number, size in enumerate((4, 4, 4, 4, 4, 4, 4, 3, 4)):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(size, 3, 16, 16, generator=generator, dtype=torch.float64).to(device)
        output, heat = engine.run(x, starter(torch.arange(size, device=device) % 5))
        found += [output, *heat]
    books = engine.conservation()
    sums = torch.tensor([[flow.arrived, flow.passed] for flow in books.flows], dtype=torch.float64)
    names = [(flow.name, flow.kind, flow.absorbs) for flow in books.flows]
    return engine, [*found, *engine.units.values(), sums], [names, list(engine.units), engine.places, engine.samples]


@pytest.mark.parametrize("composite", ["alpha1beta0", "epsilon_gamma_box"])
@pytest.mark.parametrize("make", [convolutional, Tokens])
@pytest.mark.parametrize("device", DEVICES)
def test_the_numbers_are_the_same_without(make, device, composite):
    full, wanted, names = run(make, device, Accelerators(), composite)
    for off in [{name: False} for name in NONE] + [NONE]:
        _, found, same = run(make, device, Accelerators(**off), composite)
        assert same == names
        # Fused layers, kernels and replays round differently; a script does not compute anything.
        exact = device == "cpu" and off != NONE and "fusion" not in off
        for mine, theirs in zip(found, wanted, strict=True):
            if exact:
                assert torch.equal(mine, theirs), off
            else:
                torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10, msg=lambda m, off=off: f"{off}: {m}")
    if make is convolutional:
        assert full._habits.trusted is True
        # ε keeps a little for itself, which counts as stuck.
        plain, _, _ = run(make, device, Accelerators(), "alpha1beta0", biased=False)
        assert (plain._recorder.recording is None) == (device == "cpu"), plain._recorder.refusal


def test_they_are_at_work_only_where_they_are_allowed():
    engine, _, _ = run(convolutional, "cpu", Accelerators(), "alpha1beta0")
    layers = engine._habits.followed.values()
    assert sum(f.norm is not None and f.rectified and not f.reread for f in layers) == 3, "conv, batch norm and ReLU"
    assert sum(f.norm is None and f.rectified for f in layers) == 4, "two convolutions and two sums with a ReLU"
    assert engine._regular
    engine, _, _ = run(convolutional, "cpu", Accelerators(**NONE), "alpha1beta0")
    assert not engine._habits.followed
    assert engine.forward._script is None
    assert engine._recorder.refusal


@pytest.mark.parametrize("make", [convolutional, Tokens])
def test_nothing_of_a_batch_stays_in_memory(make, monkeypatch):
    known, begin = weakref.WeakSet(), RelevancePass.begin

    def noted(self, *args):
        propagation, entries = begin(self, *args)
        known.update({propagation, propagation.activations, propagation.backward})
        return propagation, entries

    monkeypatch.setattr(RelevancePass, "begin", noted)
    for accelerators in (Accelerators(), Accelerators(**NONE)):
        run(make, "cpu", accelerators, "attnlrp")
        gc.collect()
        assert not known


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_are_compiled_and_left_alone_on_request():
    from secateur.relevance import rules

    device = torch.device("cuda", torch.cuda.current_device())
    names = {"over_positive", "by_positive_parts", "rectified", "by_factor", "centred"}
    assert set(_kernels.available(device)) == names
    z, r = torch.rand(9, device=device), torch.rand(9, device=device)
    before = z.clone()
    torch.testing.assert_close(rules.over_positive(r, z), r / before)
    assert torch.equal(z, before), "the kernel does not overwrite"
    with _kernels.allowed(False):
        torch.testing.assert_close(rules.over_positive(r, z), r / before)
    assert not torch.equal(z, before), "the formula does"


def picture(device: str) -> tuple[ConvMap, Tensor, Tensor]:
    """A convolution, inputs with channels last, and what it gives with bias and ReLU, from the definition."""
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 32, 3, stride=2, padding=1).to(device).requires_grad_(False)
    layer = ConvMap(conv.weight, conv.bias, Geometry((2, 2), (1, 1), (1, 1), output_padding=(0, 0)))
    x = torch.randn(5, 16, 20, 20, device=device).to(memory_format=torch.channels_last)
    exact = F.conv2d(x.double(), conv.weight.double(), conv.bias.double(), 2, 1).relu()
    return layer, x, exact


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("tf32", "apart"), [(False, 1e-5), (True, 2e-3)])
def test_cudnn_computes_convolution_bias_and_relu_at_once(tf32, apart, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    _fusion._agrees.clear()
    layer, x, exact = picture("cuda")
    for made in (_fusion._by_cudnn(layer, x), _fusion._forward(layer, x, True)):
        if made is not None:
            assert float((made - exact).norm() / exact.norm()) < apart
    if tf32:
        assert list(_fusion._agrees.values()) == [True], "the kernel that makes it fast is used"
    with _kernels.allowed(False):
        assert _fusion._by_cudnn(layer, x) is None
    assert _fusion._by_cudnn(layer, x.contiguous()) is None


@pytest.mark.parametrize("kernel", ["right", "wrong", "none"])
def test_cudnn_is_used_only_where_it_agrees(kernel, monkeypatch):
    layer, x, exact = picture("cpu")
    calls: list[int] = []

    def at_once(x, weight, bias, stride, padding, dilation, groups):
        calls.append(len(x))
        if kernel == "none":
            raise RuntimeError("unable to find an engine to execute this computation")
        made = F.conv2d(x, weight, bias, stride, padding, dilation, groups).relu()
        return made if kernel == "right" else made + 0.1

    monkeypatch.setattr(torch, "cudnn_convolution_relu", at_once)
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    _fusion._agrees.clear()
    found = [_fusion._by_cudnn(layer, x) for _ in range(2)]
    _fusion._agrees.clear()
    if kernel == "right":
        assert calls == [1, 5, 5], "one sample is compared, once"
        torch.testing.assert_close(found[1].double(), exact, rtol=1e-5, atol=1e-5)
    else:
        assert (found, calls) == ([None, None], [1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 7, 64, 5000])
def test_a_product_with_ones_is_the_sum_of_the_rows(count, device):
    rows = torch.randn(count, 9, device=device)
    assert torch.allclose(by_ones(rows).double(), rows.double().sum(0), atol=1e-6 * count)
    assert torch.equal(by_ones(rows[:1]), rows[0])  # a larger tensor of ones is kept
