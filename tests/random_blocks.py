"""Blocks of random networks as source code: what people write in forwards, from the usual to the odd.

A block begins with `## its name`. Then come the lines of its `__init__`, a line `--`, and the lines of its forward,
which maps `x` to a tensor of the same shape. `$c` is the width, `$h` a number of heads that divides it, `$act` one of
many activations, and `«a|b»` stands for either a or b. Blocks marked `!` keep their precision or the size of their
input, so that they are not put into networks of half precision or of varying size.
"""

from __future__ import annotations

# ruff: noqa: E501

PRELUDE = """
import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from torch import nn

def conv(i, o, k=3, **kw):
    return nn.Conv2d(i, o, k, padding=kw.pop("padding", k // 2), **kw)

def shuffle(x, groups):
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)

def turned(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)
"""

IMAGES = """
## conv
self.a, self.n = conv($c, $c), «nn.BatchNorm2d($c)|nn.InstanceNorm2d($c, affine=True)|nn.Identity()|nn.GroupNorm(4, $c)»
--
return $act(self.n(self.a(x)))
## norm first
self.n, self.a, self.b = «nn.BatchNorm2d($c)|nn.GroupNorm(1, $c)|nn.GroupNorm(4, $c)», conv($c, 2 * $c, 1), conv(2 * $c, $c)
--
return x + self.b($act(self.a(self.n(x))))
## residual
self.a, self.b, self.n = conv($c, $c), conv($c, $c), nn.BatchNorm2d($c)
--
return «(x + self.n(self.b($act(self.a(x))))).relu()|self.n(self.b(self.a(x).relu_())).add_(x).relu_()|torch.add(self.b($act(self.a(x))), x, alpha=0.5)»
## bottleneck
self.a, self.b, self.d = conv($c, $c // 2, 1), conv($c // 2, $c // 2), conv($c // 2, $c, 1)
--
return F.relu(self.d($act(self.b($act(self.a(x))))) + x)
## depthwise
self.a, self.b = conv($c, $c * «1|2», groups=$c), nn.BatchNorm2d($c)
self.d = conv(self.a.out_channels, $c, 1)
--
return self.b(self.d($act(self.a(x))))
## grouped
self.a, self.b = conv($c, 2 * $c, groups=«2|4»), conv(2 * $c, $c, 1, groups=«1|4»)
--
return self.b($act(self.a(x)))
## squeeze excite
self.a, self.b = «conv($c, $c // 2, 1), conv($c // 2, $c, 1)|nn.Conv2d($c, 3, 1), nn.Conv2d(3, $c, 1)»
--
g = self.b(F.relu(self.a(«x.mean((2, 3), keepdim=True)|F.adaptive_avg_pool2d(x, 1)|x.mean([-2, -1], True)|x.amax((2, 3), keepdim=True)»)))
return x * «g.sigmoid()|torch.sigmoid(g + 1)|F.hardsigmoid(g)|g.softmax(1)|(1 + g.tanh())»
## squeeze excite, linear
self.a, self.b = nn.Linear($c, $c // 2), nn.Linear($c // 2, $c)
--
n, c = x.shape[:2]
g = self.b(F.relu(self.a(F.adaptive_avg_pool2d(x, 1).«view(n, c)|flatten(1)|squeeze(-1).squeeze(-1)|reshape(n, -1)»))).sigmoid()
return x * g.«view(n, c, 1, 1)|view(n, -1, 1, 1)|view(n, $c, 1, 1)|unsqueeze(-1).unsqueeze(-1)|view(n, c, 1, 1).expand_as(x)»
## channel attention by conv1d
self.a, self.b = nn.Conv1d(1, 1, 3, padding=1, bias=False), conv($c, $c)
--
g = self.a(x.mean((2, 3)).unsqueeze(1)).squeeze(1).sigmoid()
return self.b(x * g[:, :, None, None])
## spatial attention
self.a = conv(2, 1)
--
return x * self.a(torch.cat([x.mean(1, keepdim=True), x.«amax(1, keepdim=True)|max(1, keepdim=True)[0]|max(dim=1, keepdim=True).values»], 1)).sigmoid()
## concat
self.a, self.b, self.d = conv($c, $c // 2), conv($c, 3), conv($c // 2 + 3 + $c, $c, 1)
--
return self.d(torch.cat(«[self.a(x), F.relu(self.b(x)), x], 1|(self.a(x), $act(self.b(x)), x), dim=1|tensors=[self.a(x), self.b(x), x], dim=1|[self.a(x), self.b(x), x], axis=1|[self.a(x), self.b(x), x], -3»))
## dense
self.a, self.b, self.d = conv($c, 4), conv($c + 4, 4), conv($c + 8, $c, 1)
--
for layer in (self.a, self.b):
    x = torch.cat([x, $act(layer(x))], 1)
return self.d(x)
## csp
self.a, self.b, self.d, self.e = conv($c, $c), conv($c // 2, $c // 2), conv($c // 2, $c // 2), conv(2 * $c, $c, 1)
--
y = list(self.a(x).«chunk(2, 1)|split($c // 2, 1)|tensor_split(2, 1)|split([$c // 2, $c - $c // 2], dim=1)|chunk(chunks=2, dim=1)»)
y.append($act(self.b(y[-1])))
y.extend([self.d(y[-1])])
return self.e(torch.cat(y, 1))
## channel shuffle
self.a, self.b = conv($c, $c«|, groups=4»), conv($c, $c)
--
return self.b(«shuffle(self.a(x), 4)|F.channel_shuffle(self.a(x), 4)|shuffle(self.a(x), 2)»)
## chunk
self.a, self.b = conv($c // 2, $c // 2), conv($c, $c, 1)
--
left, right = «x.chunk(2, 1)|torch.chunk(x, 2, dim=1)|x.split($c // 2, 1)|(x[:, : $c // 2], x[:, $c // 2 :])|(x[:, : x.size(1) // 2], x[:, x.size(1) // 2 :])|x.unflatten(1, (2, -1)).unbind(1)»
return self.b(torch.cat([left, self.a(right)], 1))
## ghost
self.a, self.b = conv($c, $c // 2, 1), conv($c // 2, $c // 2, groups=$c // 2)
--
y = $act(self.a(x))
return torch.cat([y, self.b(y)], dim=1)
## glu
self.a, self.b = conv($c, 2 * $c, 1), conv($c, $c)
--
return self.b(«F.glu(self.a(x), 1)|F.glu(self.a(x), dim=-3)|self.a(x)[:, ::2] * self.a(x)[:, 1::2].sigmoid()|torch.mul(*self.a(x).chunk(2, 1))|self.a(x).view(x.shape[0], 2, -1, *x.shape[2:]).prod(1)»)
## layer scale
self.a, self.gamma = conv($c, $c), nn.Parameter(torch.rand($c«, 1, 1|»))
--
return x + (self.gamma if self.gamma.ndim == 3 else self.gamma[:, None, None]) * self.a(x)
## slices
self.a, self.b = conv(3, $c), conv($c - 3, $c)
--
return self.a(x[:, :3]) - self.b(«x[:, 3:]|x.narrow(1, 3, $c - 3)|x[:, 3 - x.size(1) :]|torch.narrow(x, 1, 3, x.size(1) - 3)»)
## strided slices
self.a, self.b = conv($c // 2, $c), conv($c // 2, $c)
--
return self.a(x[:, ::2]) + self.b($act(x[:, 1::2]))
## zero padding of channels
self.a, self.b = conv($c, $c), conv($c, $c)
--
return F.pad(self.a(x)[:, 2:], (0, 0, 0, 0, «0, 2|2, 0|1, 1»)) + self.b(x)
## prelu
self.a, self.b, self.slope = conv($c, $c), conv($c, $c), nn.PReLU(«$c|1»)
--
return self.slope(self.b(self.slope(self.a(x))))
## layer norm, channels last
self.a, self.n = conv($c, $c), «nn.LayerNorm($c)|nn.RMSNorm($c)»
--
return self.n(self.a(x).«permute(0, 2, 3, 1)|movedim(1, -1)»).«permute(0, 3, 1, 2)|movedim(-1, 1)» + x
## layer norm, functional
self.a, self.w, self.b = conv($c, $c), nn.Parameter(torch.rand($c)), nn.Parameter(torch.rand($c))
--
y = F.layer_norm(self.a(x).permute(0, 2, 3, 1), «($c,)|self.w.shape|(x.shape[1],)», self.w, self.b).permute(0, 3, 1, 2)
return y + x
## norm by hand
self.a, self.w = conv($c, $c), nn.Parameter(torch.rand($c, 1, 1))
--
y = self.a(x)
«m, v = y.mean(1, keepdim=True), y.var(1, keepdim=True, unbiased=False)|v, m = torch.var_mean(y, 1, keepdim=True)|m, v = y.mean((2, 3), keepdim=True), y.var((2, 3), keepdim=True)|m, v = 0, y.square().mean(1, keepdim=True)|m, v = 0, y.pow(2).sum(1, keepdim=True) / y.shape[1]|m = y.mean(1, True); v = (y - m).pow(2).mean(1, True)»
return x + (y - m) * torch.rsqrt(v + 1e-5) * self.w
## global response norm
self.a, self.b, self.g = conv($c, 2 * $c, 1), conv(2 * $c, $c, 1), nn.Parameter(torch.rand(1, 2 * $c, 1, 1))
--
y = self.a(x)
s = torch.norm(y, p=2, dim=(2, 3), keepdim=True)
return x + self.b(y * (1 + self.g * s / (s.mean(1, keepdim=True) + 1e-6)))
## unit length
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = self.a(x)
return self.b(«F.normalize(y, dim=1)|F.normalize(y, dim=(2, 3))|y / y.norm(dim=1, keepdim=True).clamp_min(1e-6)|y / (torch.linalg.vector_norm(y, dim=1, keepdim=True) + 1e-6)|y / (y.abs().sum() + 1)|F.normalize(y, p=1)»)
## reuse
self.a = conv($c, $c)
--
for _ in range(2):
    x = $act(self.a(x))
return x
## attention over pixels
self.qkv, self.proj = nn.Linear($c, 3 * $c), nn.Linear($c, $c)
self.num_heads, self.head_dim = $h, $c // $h
--
n, _, h, w = x.shape
q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).reshape(n, h * w, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
return x + self.proj(y).transpose(1, 2).reshape(n, -1, h, w)
## non-local
self.q, self.k, self.v, self.o = conv($c, 6, 1), conv($c, 6, 1), conv($c, 6, 1), conv(6, $c, 1)
--
n, _, h, w = x.shape
q, k, v = (layer(x).flatten(2) for layer in (self.q, self.k, self.v))
a = torch.softmax(q.transpose(1, 2) @ k«| / math.sqrt(q.size(1))| * 6**-0.5| / (h * w)», -1)
return x + self.o((v @ a.transpose(1, 2)).view(n, «-1|v.size(1)|6», h, w))
## channel attention, gram matrix
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = self.a(x).flatten(2)
g = y @ y.mT«| / y.shape[-1]| / y.shape[1]»
return self.b((g.softmax(-1) @ y).view_as(x))
## pixel shuffle
self.a, self.b = conv($c, 4 * 5, 1), nn.Conv2d(5, $c, 2, 2)
--
return self.b(F.pixel_shuffle(self.a(x), 2))
## pixel unshuffle
self.a, self.b = conv(4 * $c, 4 * 6, 1), conv(6, $c)
--
return self.b(F.pixel_shuffle(self.a(F.pixel_unshuffle(x, 2)), 2))
## space to depth by hand
self.a, self.b = conv(4 * $c, $c, 1), nn.ConvTranspose2d($c, $c, 2, 2)
--
n, c, h, w = x.shape
y = «x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, 4 * c, h // 2, w // 2)|torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)|x.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4).flatten(1, 3)»
return self.b($act(self.a(y)))
## pools
self.a = conv($c, $c)
--
return «F.avg_pool2d(F.max_pool2d(self.a(x), 3, 1, 1), 3, 1, 1)|F.lp_pool2d(F.pad(self.a(x).abs(), (1, 1, 1, 1)), 2, 3, 1)|F.interpolate(F.adaptive_max_pool2d(self.a(x), 2), x.shape[-2:])|F.interpolate(F.avg_pool2d(self.a(x), 2), scale_factor=2, mode="bilinear")» + x
## pool and unpool
self.a, self.b = conv($c, $c), conv($c, $c)
--
y, at = F.max_pool2d(self.a(x), 2, return_indices=True)
return self.b(F.max_unpool2d(y, at, 2))
## pyramid pooling
self.a, self.b = conv($c, $c // 2, 1), conv($c + $c // 2, $c)
--
y = F.interpolate(self.a(F.adaptive_avg_pool2d(x, «1|2»)), size=x.shape[2:], mode=«"nearest"|"bilinear"»)
return self.b(torch.cat([x, y], 1))
## transposed conv
self.a, self.b = nn.ConvTranspose2d($c, $c // 2, 2, 2), nn.Conv2d($c // 2, $c, 2, 2)
--
return self.b($act(self.a(x)))
## transposed conv, output padding
self.a, self.b = nn.Conv2d($c, 6, 3, 2, 1), nn.ConvTranspose2d(6, $c, 3, stride=2, padding=1, output_padding=1)
--
return x + self.b(F.relu(self.a(x)))
## stack
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = torch.stack([self.a(x), $act(self.b(x))], 1)
return y.«amax(1)|mean(1)|sum(dim=1)|unbind(1)[0]|median(1)[0]|select(1, 1)|prod(1)|flatten(1, 2)[:, ::2]|norm(dim=1)|mean(axis=1)»
## unfold and matmul
self.w, self.b = nn.Parameter(torch.randn($c, 9 * $c) / 9), nn.Parameter(torch.randn($c))
--
n, c, h, w = x.shape
y = F.unfold(x, 3, padding=1)
return («self.w @ y + self.b[:, None]|torch.matmul(self.w, y) + self.b.view(-1, 1)|F.linear(y.transpose(1, 2), self.w, self.b).mT|torch.einsum('ok,nkl->nol', self.w, y)|(y.mT @ self.w.t()).mT»).view(n, -1, h, w)
## unfold and fold
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = F.unfold(self.a(x), 2, stride=2)
return self.b(F.fold(«y|y * 0.5|y.tanh()», x.shape[2:], 2, stride=2))
## involution
self.a, self.b = conv($c, 9, 1), conv($c, $c)
--
n, c, h, w = x.shape
k = self.a(x).view(n, 1, 9, h, w)
return self.b((F.unfold(x, 3, padding=1).view(n, c, 9, h, w) * k).sum(2))
## windows
self.a = nn.Linear($c, $c)
--
n, c, h, w = x.shape
y = x.view(n, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)
y = y + torch.softmax(y @ y.mT, -1) @ self.a(y)
return y.view(n, h // 4, w // 4, 4, 4, c).permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w)
## tensor unfold
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = self.a(x).unfold(2, 2, 2).unfold(3, 2, 2)
return self.b(F.interpolate(y.mean((-1, -2)), scale_factor=2))
## flip and roll
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = self.a(x)
return self.b(«y.flip(-1)|y.flip((2, 3))|y.flip(1)|torch.roll(y, 1, 1)|y.roll((1, 2), dims=(2, 3))|y.roll(1, 0)|y.flip(0)|torch.roll(y, 3)|y.transpose(2, 3).rot90(1, (2, 3))»)
## shifted channels
self.a, self.b = conv($c, $c), conv($c, $c, 1)
--
y = self.a(x)
z = torch.zeros_like(y)
z[:, : $c // 4, 1:] = y[:, : $c // 4, :-1]
z[:, $c // 4 : $c // 2, :, 1:] = y[:, $c // 4 : $c // 2, :, :-1]
z[:, $c // 2 :] = y[:, $c // 2 :]
return self.b(z)
## chosen channels
self.a, self.b = conv($c, $c), conv($c, $c)
self.register_buffer("order", torch.randperm($c))
--
y = self.a(x)
return self.b(«y[:, self.order]|y.index_select(1, self.order)|torch.index_select(y, 1, self.order.flip(0))|y[:, list(range($c - 1, -1, -1))]|torch.gather(y, 1, self.order.view(1, -1, 1, 1).expand_as(y))|torch.take_along_dim(y, self.order.view(1, -1, 1, 1), 1)|y[:, self.order % 4]»)
## expanded channels
self.a, self.b = conv($c, $c // 2), conv($c, $c)
--
y = self.a(x)
return self.b(«y.repeat(1, 2, 1, 1)|y.repeat_interleave(2, 1)|y.unsqueeze(1).expand(-1, 2, -1, -1, -1).flatten(1, 2)|y.tile((1, 2, 1, 1))|y[:, None].repeat(1, 2, 1, 1, 1).reshape(len(x), -1, *x.shape[2:])|y.unsqueeze(2).expand(-1, -1, 2, -1, -1).reshape(x.shape)»)
## expanded maps
self.a, self.b = conv($c, 1), conv($c, $c)
--
y = self.a(x)
return self.b(x + «y.expand_as(x)|y.expand(-1, $c, -1, -1)|y.expand(-1, x.size(1), -1, -1)|y.repeat(1, $c, 1, 1)|y»)
## strided view
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = self.a(x).contiguous()
return self.b(y.as_strided(y.shape, y.stride()))
## fourier transform over space
self.a, self.f = conv($c, $c), nn.Parameter(torch.rand($c, 1, 1))
--
y = torch.fft.«rfft2(self.a(x), norm="ortho")|rfftn(self.a(x), dim=(2, 3))»
return x + torch.fft.irfft2(y * self.f, s=x.shape[-2:]«, norm="ortho"|»)
## complex filter !
self.a, self.f = conv($c, $c), nn.Parameter(torch.randn($c, 8, 5, 2))
--
y = torch.fft.rfft2(self.a(x)) * torch.view_as_complex(self.f)
return x + torch.fft.irfft2(y, s=(8, 8))
## fourier transform over channels
self.a, self.b = conv($c, $c), conv($c, $c)
--
return self.b(torch.fft.fft(self.a(x), dim=1).«real|imag|abs()|angle()»)
## complex numbers
self.a, self.b, self.d = conv($c, $c), conv($c, $c), conv($c, $c)
--
z = torch.«complex(self.a(x), self.b(x))|polar(self.a(x).abs(), self.b(x))»
return self.d(«z.abs()|z.real * z.imag|(z * z.conj()).real|torch.view_as_real(z).sum(-1)|z.exp().real.clamp(-9, 9)|torch.view_as_real(z * 1j)[..., 0]»)
## mixture of kernels
self.bank, self.route = nn.Parameter(torch.randn(3, $c, $c, 3, 3) / 9), nn.Linear($c, 3)
--
n, c, h, w = x.shape
alpha = self.route(x.mean((2, 3))).softmax(-1)
k = «torch.einsum("nk,koihw->noihw", alpha, self.bank)|(alpha @ self.bank.flatten(1)).view(n, $c, c, 3, 3)»
return F.conv2d(x.reshape(1, n * c, h, w), k.reshape(n * $c, c, 3, 3), padding=1, groups=n).view(n, $c, h, w)
## kernels from the input
self.a, self.b = nn.Linear($c, $c * 9), conv($c, $c)
--
n, c, h, w = x.shape
k = self.a(x.mean((2, 3))).view(n * c, 1, 3, 3)
return self.b(F.conv2d(x.reshape(1, n * c, h, w), k, padding=1, groups=n * c).view(n, c, h, w))
## weight used twice
self.w = nn.Parameter(torch.randn($c, $c, 3, 3) / 9)
--
y = $act(F.conv2d(x, self.w, padding=1))
return «F.conv_transpose2d(y, self.w, padding=1)|F.conv2d(y, self.w.transpose(0, 1), padding=1)|F.conv2d(y, -self.w, padding=1)|F.conv2d(y, self.w.flip(-1), padding=1)|F.conv2d(y, self.w * 0.5, padding=1) - F.conv2d(x, self.w, padding=1)|F.conv2d(y, self.w.mean((2, 3), keepdim=True))»
## halves of a weight
self.w = nn.Parameter(torch.randn(2 * $c, $c, 1, 1) / 3)
--
a, b = «self.w.chunk(2)|self.w.split($c)|(self.w[:$c], self.w[$c:])|self.w.view(2, $c, $c, 1, 1).unbind(0)»
return F.conv2d(F.relu(F.conv2d(x, a)), b)
## standardised weight
self.w = nn.Parameter(torch.randn($c, $c, 3, 3) / 9)
--
w = self.w - self.w.mean((1, 2, 3), keepdim=True)
return F.conv2d(x, w / w.std((1, 2, 3), keepdim=True)«|.clamp_min(1e-6)», padding=1)
## masked weight
self.a = conv($c, $c)
self.register_buffer("mask", (torch.rand($c, $c, 3, 3) > 0.5).float())
--
return «F.conv2d(x, self.a.weight * self.mask, self.a.bias, padding=1)|F.conv2d(x, self.a.weight.masked_fill(self.mask == 0, 0.0), padding=1)|F.conv2d(x, weight=self.a.weight * self.mask, bias=self.a.bias, padding=1)»
## modulated conv
self.a, self.s = conv($c, $c), nn.Linear($c, $c)
--
n, c, h, w = x.shape
k = self.a.weight[None] * (1 + self.s(x.mean((2, 3))))[:, None, :, None, None]
k = k * torch.rsqrt(k.square().sum((2, 3, 4), keepdim=True) + 1e-8)
return F.conv2d(x.reshape(1, -1, h, w), k.flatten(0, 1), padding=1, groups=n).view(n, -1, h, w)
## size in arithmetic
self.a, self.b = conv($c, $c), conv($c, $c)
self.dim, self.scale = $c, $c**-0.5
--
y = self.a(x)
return self.b(y «* (10 / y.size(1))|/ math.sqrt(y.shape[1])|* y.size(1) ** -0.5|* self.scale|* self.dim**-0.5|/ len(y[0])|* (y[0].numel() / 512)|+ 0.01 * y.shape[1]|* (y.numel() / y.size(0) / y.size(2) / y.size(3)) ** 0.5|* float(torch.tensor(y.shape[1:]).sum())|* torch.tensor(y.shape[1])|/ (y.shape[1] // 2)|* math.prod(y.shape[1:]) ** -0.1|* (1 if y.shape[1] > $c - 3 else 2)|/ torch.tensor(float(y.size(1))).sqrt()»)
## sum divided by a size
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = self.a(x)
return self.b(x + «y.sum(1, keepdim=True) / y.shape[1]|y.sum((1, 2, 3), keepdim=True) / y[0].numel()|y.sum(1, keepdim=True) / $c|y.mean(1, keepdim=True)|y.flatten(1).mean(1)[:, None, None, None]|y.sum(1, True)|y.mean()|y.std(1, keepdim=True)»)
## positions along channels
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = self.a(x)
return self.b(y * «torch.arange(y.size(1), dtype=y.dtype).view(-1, 1, 1)|torch.linspace(0, 1, y.shape[1], dtype=y.dtype)[:, None, None]|torch.ones(y.size(1), 1, 1, dtype=y.dtype)|torch.ones($c, 1, 1, dtype=y.dtype)|y.new_ones(y.shape[1], 1, 1)|torch.full_like(y, 0.5)|torch.ones_like(y).cumsum(1)|y.new_tensor([1.0, -1.0] * ($c // 2)).view(1, -1, 1, 1)»)
## a loop over channels
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = self.a(x)
return self.b(«torch.stack([y[:, i] * (i + 1) for i in range(y.size(1))], 1)|torch.cat([t for t in y.split(1, 1)][::-1], 1)|torch.stack(y.unbind(1), 1)|torch.cat([y[:, i : i + 1] for i in range($c)], 1)|sum(y[:, i : i + 1] for i in range(y.size(1))) + x»)
## over channels
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = self.a(x)
return self.b(x + «y.softmax(1)|y.cumsum(1)|y.sort(1)[0]|y.logsumexp(1, keepdim=True)|y.amax(1, keepdim=True)|y.prod(1, keepdim=True).tanh()|y.argmax(1, keepdim=True)|y.topk(2, 1)[0].sum(1, keepdim=True)|(y == y.amax(1, keepdim=True)) * y|y.norm(dim=1, keepdim=True)|F.gumbel_softmax(y, dim=1) * 0|y.diff(dim=1).sum(1, True)|F.softmin(y, 1)|y.kthvalue(2, 1, True)[0]|F.local_response_norm(y, 3)»)
## einsum
self.w, self.b = nn.Parameter(torch.randn($c, $c) / 3), conv($c, $c)
--
return self.b(«torch.einsum("nchw,dc->ndhw", x, self.w)|torch.einsum("n c h w, d c -> n d h w", x, self.w)|torch.einsum("bchw,cd->bdhw", [x, self.w])|torch.einsum("...chw,dc->...dhw", x, self.w)|torch.einsum("nchw,nchw->nhw", x, x).unsqueeze(1) + x|torch.einsum("nchw->ncwh", x).mT|torch.einsum("nchw,ncuv->nc", x, x)[:, :, None, None] * x|torch.einsum("nchw,c->nchw", x, self.w[0])|torch.einsum("nchw,ndhw->ncd", x, x).softmax(-1).mean(1)[:, :, None, None] * x|torch.einsum("ncij,de,dc->neij", x, self.w, self.w)|torch.einsum("cc,nchw->nchw", self.w, x)|torch.einsum("nchw,nchw->nc", x, x)[..., None, None] * x»)
## a counter
self.a = conv($c, $c)
self.register_buffer("calls", torch.zeros(())«|, persistent=False»)
self.seen = 0
--
«self.calls += 1|self.calls.add_(1)|self.calls = self.calls + 1»
self.seen += 1
return x + self.a(x) / «self.calls|(1 + self.calls)|self.seen|1»
## a moving average
self.a = conv($c, $c)
self.register_buffer("ema", torch.«zeros|ones»($c))
--
y = self.a(x)
with torch.no_grad():
    «self.ema.mul_(0.9).add_(y.mean((0, 2, 3)), alpha=0.1)|self.ema = 0.9 * self.ema + 0.1 * y.mean((0, 2, 3))|self.ema.lerp_(y.mean((0, 2, 3)), 0.1)|self.ema.copy_(y.amax((0, 2, 3)))»
return y - self.ema[:, None, None]
## something remembered
self.a, self.last, self.cache = conv($c, $c), None, []
--
y = self.a(x)
«self.last = y.detach()|self.cache.append(y.detach().mean())|self.last = y if self.last is None or self.last.shape != y.shape else 0.5 * self.last + y»
return x + y
## branch on numbers
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = self.a(x)
if «y.sum() > 0|y.mean() > 0.01|x[0, 0, 0, 0] > 0|y.abs().max() > 1|bool((x > 0).any())|y.std() > 0.5»:
    y = self.b(y)
return y + x
## branch on shapes
self.a, self.b, self.d = conv($c, $c), conv($c, $c), conv($c, $c)
--
y = self.a(x)
if «x.shape[-1] > 8|x.shape[0] > 2|y.shape[1] == $c|y.size(1) % 2|x.ndim == 3|x.numel() > 1500»:
    y = $act(self.b(y))
return self.d(y) + x
## only in training
self.a, self.b, self.n = conv($c, $c), conv($c, $c), nn.BatchNorm2d($c)
--
y = self.a(x)
if «self.training|not self.training»:
    y = y + self.«n(self.b(y))|b(y)»
return y
## noise
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = self.a(x)
return self.b(«y + 0.1 * torch.randn_like(y)|y * torch.rand(y.shape, dtype=y.dtype)|F.dropout(y, 0.3, training=True)|F.dropout(y, 0.3, training=self.training)|F.dropout2d(y, 0.2)|y * torch.bernoulli(torch.full_like(y, 0.5))|y + torch.normal(0.0, 0.1, size=y.shape).to(y)|y + y.new_empty(y.shape).normal_()|y + torch.empty_like(y).uniform_(-1, 1)|F.alpha_dropout(y, 0.1, self.training)|F.rrelu(y, training=True)»)
## stochastic depth
self.a = conv($c, $c)
--
if self.training and torch.rand(1).item() < 0.5:
    return x
return x + self.a(x) * «1|torch.empty(len(x), 1, 1, 1, dtype=x.dtype).bernoulli_(0.9)»
## hook on an output
self.a, self.b = conv($c, $c), conv($c, $c)
self.a.«register_forward_hook(lambda m, args, out: «out * 2|out + 1|out.relu()|torch.cat([out[:, 1:], out[:, :1]], 1)|None|out[:, :] * out.shape[1]»)|register_forward_pre_hook(lambda m, args: «(args[0] * 2,)|args[0] + 1|None»)»
--
return self.b($act(self.a(x)))
## experts, soft
self.gate, self.experts = nn.Linear($c, 3), nn.ModuleList(conv($c, $c) for _ in range(3))
--
g = self.gate(x.mean((2, 3))).softmax(-1)
return «sum(g[:, i, None, None, None] * e(x) for i, e in enumerate(self.experts))|torch.einsum("ne,enchw->nchw", g, torch.stack([e(x) for e in self.experts]))|(g[:, :, None, None, None] * torch.stack([e(x) for e in self.experts], 1)).sum(1)»
## experts, hard
self.gate, self.experts = nn.Linear($c, 3), nn.ModuleList(conv($c, $c) for _ in range(3))
--
best = self.gate(x.mean((2, 3))).argmax(-1)
y = torch.zeros_like(x)
for i, expert in enumerate(self.experts):
    at = «best == i|(best == i).nonzero().squeeze(1)|torch.where(best == i)[0]»
    y[at] = expert(x[at])
return y + x
## coordinates
self.a = conv($c + 2, $c)
--
n, _, h, w = x.shape
r, s = torch.linspace(-1, 1, h, dtype=x.dtype), torch.linspace(-1, 1, w, dtype=x.dtype)
grid = torch.stack(torch.meshgrid(r, s, indexing="ij"))[None].expand(n, -1, -1, -1)
return self.a(torch.cat([x, grid], 1))
## sampling at learned places
self.a, self.b = conv($c, 2), conv($c, $c)
--
n, _, h, w = x.shape
base = F.affine_grid(torch.eye(2, 3, dtype=x.dtype).expand(n, 2, 3), (n, 1, h, w), align_corners=False)
return self.b(F.grid_sample(x, base + 0.1 * self.a(x).tanh().permute(0, 2, 3, 1), align_corners=False))
## remembered width
self.a, self.b = conv($c, $c), conv($c, $c)
self.«dim|h|H|channels|max_len|size|width|planes» = $c
self.«limit|max_len|top|w» = $c
--
n, _, h, w = x.shape
k = next(v for k, v in vars(self).items() if type(v) is int)
y = self.a(x).«view(n, k, h * w).view(n, k, h, w)|reshape(n, 1, k, h, w)[:, 0]|view(-1, k, h, w)» * «1|min(k, 40) / 8|1»
return self.b(y[..., : «k|getattr(self, 'limit', 99)|99»])
## in place
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = self.a(x)
«y[:, :2] = 0|y[:, 0] += 1|y.mul_(0.5).add_(1)|y[:, 1] = x[:, 0]|y.clamp_(min=0)|y[:, -1:] *= 2|y[y > 1] = 1|y.masked_fill_(y < 0, 0.1)|y[:, :, 0].zero_()|y += x|y[:, $c // 2 :].relu_()|y.index_fill_(1, torch.tensor([0, 2]), 0.5)|y.copy_(y * 2)|y.transpose_(2, 3)|y.unsqueeze_(0).squeeze_(0)»
return self.b(y)
## choices per number
self.a, self.b, self.d = conv($c, $c), conv($c, $c), conv($c, $c)
--
y, z = self.a(x), self.b(x)
return self.d(«torch.where(y > 0, y, z)|torch.maximum(y, z)|torch.clamp(y, min=z)|torch.clamp(y, max=z.abs())|y.lerp(z, 0.3)|torch.addcmul(x, y, z)|torch.atan2(y, z)|torch.where(y > z, y, 0.5)|y.clamp(-1, 1) * z.sign()|torch.hypot(y, z)|(y > 0) * z|(y + z).masked_fill(y > 1, 1.0)|torch.cdist(y, z)|y.heaviside(z)|F.threshold(y, 0.1, 0.2) + z|y.xlogy(z.abs() + 1)|y.round() + z|torch.remainder(y, 1.5) + z|torch.lerp(y, z, torch.sigmoid(x))|y * z.detach()|y.fmod(2) * z|y ** 2 / (1 + z ** 2)»)
## functions not zero at zero
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = «self.a(x).exp().clamp_max(9)|self.a(x).sigmoid()|F.elu(self.a(x)) + 1|self.a(x).cos()|self.a(x) + 1|1 / (1 + self.a(x) ** 2)|F.softplus(self.a(x))|(self.a(x) > 0).to(x)»
return «self.b(y)|self.b(x) + y.sum(1, keepdim=True)|x * y|x + y.prod(1, keepdim=True)|self.b(x) + (y * y).sum(1, keepdim=True)|self.b(x) * torch.einsum("nchw,nchw->nhw", y, y)[:, None]|self.b(y * y)»
## axis permuted
self.a = nn.Linear($c, $c)
--
return «self.a(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)|self.a(x.transpose(1, -1)).transpose(1, -1)|self.a(x.movedim(1, 3)).movedim(3, 1)|self.a(x.swapaxes(1, 3)).swapaxes(3, 1)|self.a(x.flatten(2).mT).mT.unflatten(2, x.shape[2:])|self.a(torch.permute(x, dims=(0, 3, 2, 1))).permute(0, 3, 2, 1)|torch.moveaxis(self.a(torch.moveaxis(x, 1, -1)), -1, 1)»
## layer over rows !
self.a, self.b = nn.Linear(8, 10), nn.Linear(10, 8)
--
return x + self.b($act(self.a(x)))«|.transpose(2, 3)»
## flattened and back !
self.a, self.b = nn.Linear($c * 64, 9), nn.Linear(9, $c * 64)
--
return self.b(self.a(x.flatten(1))).«view_as(x)|view(x.shape)|view(-1, $c, 8, 8)|unflatten(1, ($c, 8, 8))|reshape(len(x), -1, 8, 8)|view(x.size())»
## convolution of lines
self.a, self.b = nn.Conv1d($c, 6, 3, padding=1), nn.Conv1d(6, $c, 1)
--
n, c, h, w = x.shape
y = $act(self.a(x.«flatten(2)|view(n, c, -1)|reshape(n, -1, h * w)»))
return self.b(y).«view(n, -1, h, w)|view(n, $c, h, w)|unflatten(-1, (h, w))»
## convolution of volumes
self.a, self.b = nn.Conv3d(1, 3, 3, padding=1), nn.Conv3d(3, 1, 1)
--
return self.b($act(self.a(x.unsqueeze(1)))).squeeze(1)
## frames as a batch
self.a, self.b = conv($c // 2, 5), conv(10, $c, 1)
--
n, c, h, w = x.shape
return self.b($act(self.a(x.reshape(n * 2, c // 2, h, w))).reshape(n, -1, h, w))
## checkpointed
self.a, self.b = conv($c, $c), conv($c, $c)
--
from torch.utils.checkpoint import checkpoint
return checkpoint(lambda t: self.b($act(self.a(t))), x, use_reentrant=False)
## mapped over samples
self.a, self.b = conv($c, $c), conv($c, $c)
--
return self.b(«torch.stack([self.a(t[None])[0] for t in x])|torch.cat([self.a(t) for t in x.split(1)])|torch.vmap(self.a)(x)|torch.stack(list(map(self.a, x)))»)
## functional call
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = torch.func.functional_call(self.a, {k: v * «1|0.5» for k, v in self.a.named_parameters()}, (x,))
return self.b($act(y))
## parameters in containers
self.p = nn.ParameterList([torch.randn($c, $c, 1, 1) / 3, torch.randn($c)])
self.q = nn.ParameterDict({"w": torch.randn($c, $c, 1, 1) / 3})
--
return F.conv2d($act(F.conv2d(x, self.p[0], self.p[1])), self.q["w"])
## batch norm without layers
self.n, self.b = nn.BatchNorm2d($c«, affine=False|, track_running_stats=False|», momentum=«0.1|None»), conv($c, $c)
--
return self.b($act(self.n(x)))
## nothing learned
--
return «x|x * 1|x.clone()|x.contiguous()|x.detach() + 0 * x|x[:]|x[...]|x.to(x.dtype)|torch.stack([x])[0]|x.view(x.shape)|x.squeeze().view_as(x)|x.reshape(-1).view_as(x)|F.pad(x, (1, 1, 1, 1))[:, :, 1:-1, 1:-1]|-x|x.split(1, 0)[0].expand_as(x) + x»
## upsampling to a size
self.a, self.b = nn.Conv2d($c, $c, 3, 2, 1), conv(2 * $c, $c)
--
y = F.interpolate(self.a(x), size=«x.shape[2:]|(x.size(2), x.size(3))|list(x.shape[-2:])», mode=«"nearest"|"bilinear"|"bicubic"»)
return self.b(torch.cat([x, y], dim=1))
## u-net
self.a, self.b, self.d = nn.Conv2d($c, 10, 3, 2, 1), nn.ConvTranspose2d(10, 6, 2, 2), conv($c + 6, $c)
--
skip = x
y = self.b($act(self.a(x)))
return self.d(torch.cat([skip, y[..., : x.shape[2], : x.shape[3]]], 1))
## tied pair
self.a = conv($c, $c)
self.b = conv($c, $c)
self.b.weight = self.a.weight
--
return self.b($act(self.a(x)))
## parametrized
self.a, self.b = «nn.utils.parametrizations.weight_norm(conv($c, $c))|nn.utils.parametrizations.spectral_norm(conv($c, $c))», conv($c, $c)
--
return self.b(self.a(x))
"""

TOKENS = """
## mlp
self.n, self.a, self.b = «nn.LayerNorm($c)|nn.RMSNorm($c)|nn.Identity()», nn.Linear($c, 2 * $c), nn.Linear(2 * $c, $c)
--
return x + self.b($act(self.a(self.n(x))))
## gated mlp
self.a, self.g, self.b = nn.Linear($c, 10), nn.Linear($c, 10), nn.Linear(10, $c)
--
return x + self.b(F.silu(self.g(x)) * self.a(x))
## gated mlp, fused
self.a, self.b = nn.Linear($c, 20), nn.Linear(10, $c)
--
«u, v = self.a(x).chunk(2, -1)|u, v = self.a(x).split(10, dim=-1)|u, v = self.a(x)[..., :10], self.a(x)[..., 10:]|u, v = self.a(x)[..., ::2], self.a(x)[..., 1::2]|u, v = self.a(x).view(*x.shape[:2], 10, 2).unbind(-1)|u, v = self.a(x).unflatten(-1, (2, 10)).unbind(-2)»
return x + self.b(«F.gelu(u) * v|u * v.sigmoid()|F.relu(u) ** 2 * v|u.exp().clamp_max(5) * v»)
## attention, fused qkv
self.qkv, self.o = nn.Linear($c, 3 * $c«, bias=False|»), nn.Linear($c, $c)
self.num_heads, self.head_dim, self.scale = $h, $c // $h, ($c // $h) ** -0.5
--
n, t, c = x.shape
«q, k, v = self.qkv(x).reshape(n, t, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)|q, k, v = self.qkv(x).reshape(n, t, 3, $h, c // $h).permute(2, 0, 3, 1, 4).unbind(0)|q, k, v = (p.view(n, t, $h, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))|q, k, v = (p.view(n, t, self.num_heads, self.head_dim).transpose(1, 2) for p in self.qkv(x).split($c, dim=2))|q, k, v = self.qkv(x).view(n, t, $h, 3, -1).permute(3, 0, 2, 1, 4)|q, k, v = self.qkv(x).view(n, t, $h, -1).transpose(1, 2).chunk(3, -1)|q, k, v = self.qkv(x).unflatten(-1, (3, $h, -1)).movedim(2, 0).transpose(2, 3)»
«y = F.scaled_dot_product_attention(q, k, v)|y = F.scaled_dot_product_attention(q, k, v, is_causal=True)|y = (q @ k.mT / math.sqrt(k.size(-1))).softmax(-1) @ v|y = torch.softmax(q @ k.transpose(-2, -1) * self.scale, dim=-1) @ v|y = ((q @ k.mT) / q.shape[-1] ** 0.5).softmax(-1) @ v|y = (q @ k.mT).softmax(-1) @ v|y = torch.einsum("nhqk,nhkd->nhqd", (torch.einsum("nhqd,nhkd->nhqk", q, k) * self.scale).softmax(-1), v)|y = F.dropout((q @ k.mT * self.head_dim**-0.5).softmax(-1), 0.1, self.training) @ v|y = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 4).softmax(-1) @ v»
return x + self.o(y.transpose(1, 2).«flatten(2)|reshape(n, t, c)|reshape(n, t, -1)|contiguous().view(n, t, self.num_heads * self.head_dim)»)
## attention, three layers
self.q, self.k, self.v, self.o = (nn.Linear($c, $c) for _ in range(4))
self.heads = $h
--
n, t, _ = x.shape
q, k, v = («p(x).view(n, t, self.heads, -1)|p(x).view(n, t, $h, $c // $h)|p(x).unflatten(-1, (self.heads, -1))|p(x).reshape(n, -1, self.heads, $c // self.heads)».transpose(1, 2) for p in (self.q, self.k, self.v))
a = q @ k.transpose(-1, -2) «/ math.sqrt(k.size(-1))|/ math.sqrt($c // $h)|* q.size(-1) ** -0.5|»
«a = a.masked_fill(torch.triu(torch.ones(t, t, dtype=torch.bool), 1), float("-inf"))|a = a + torch.zeros(t, t, dtype=x.dtype).fill_(-100.0).triu(1)|a = a|a = a - a.amax(-1, keepdim=True)|a = a + torch.arange(t, dtype=x.dtype)»
return x + self.o((a.softmax(-1) @ v).transpose(1, 2).reshape(n, t, -1))
## attention, one head
self.q, self.k, self.v, self.o = nn.Linear($c, 6), nn.Linear($c, 6), nn.Linear($c, 10), nn.Linear(10, $c)
--
q, k, v = self.q(x), self.k(x), self.v(x)
«a = torch.bmm(q, k.transpose(1, 2))|a = q @ k.mT / 6**0.5|a = torch.einsum("nqd,nkd->nqk", q, k)|a = q @ k.mT / math.sqrt(q.size(2))|a = torch.baddbmm(x.new_zeros(1, 1, 1), q, k.mT, alpha=0.3)|a = (q[:, :, None] - k[:, None]).pow(2).sum(-1) * -0.1|a = (q[:, :, None] * k[:, None]).mean(-1)|a = -torch.cdist(q, k)|a = F.cosine_similarity(q[:, :, None], k[:, None], dim=-1)|a = (q[:, :, None] + k[:, None]).tanh().sum(-1)»
return x + self.o(a.softmax(-1) @ v)
## grouped queries
self.q, self.k, self.v, self.o = nn.Linear($c, $c), nn.Linear($c, $c // 2), nn.Linear($c, $c // 2), nn.Linear($c, $c)
--
n, t, _ = x.shape
d = $c // 4
q, k, v = (p(x).view(n, t, -1, d).transpose(1, 2) for p in (self.q, self.k, self.v))
«k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)|k, v = (u[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for u in (k, v))|k, v = (u[:, :, None].expand(n, 2, 2, t, d).reshape(n, 4, t, d) for u in (k, v))»
return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, -1))
## rotary attention
self.q, self.k, self.v, self.o = (nn.Linear($c, $c) for _ in range(4))
angles = torch.outer(torch.arange(16.0), 10.0 ** -torch.arange(0, 1, 2 / ($c // $h))[: $c // $h // 2])
self.register_buffer("cos", torch.cat([angles, angles], 1).cos()«|, persistent=False»)
self.register_buffer("sin", torch.cat([angles, angles], 1).sin()«|, persistent=False»)
--
n, t, _ = x.shape
q, k, v = (p(x).view(n, t, $h, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
q, k = (u * self.cos[:t] + turned(u) * self.sin[:t] for u in (q, k))
return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
## rotary by complex numbers !
self.q, self.k, self.v, self.o = (nn.Linear($c, $c) for _ in range(4))
self.register_buffer("turn", torch.polar(torch.ones(16, $c // $h // 2), torch.rand(16, $c // $h // 2)))
--
n, t, _ = x.shape
q, k, v = (p(x).view(n, t, $h, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
q, k = (torch.view_as_real(torch.view_as_complex(u.reshape(*u.shape[:-1], -1, 2).contiguous()) * self.turn[:t]).flatten(3) for u in (q, k))
return x + self.o(F.scaled_dot_product_attention(q, k.to(q), v).transpose(1, 2).flatten(2))
## linear attention
self.q, self.k, self.v, self.o = (nn.Linear($c, $c) for _ in range(4))
--
n, t, _ = x.shape
q, k, v = (p(x).view(n, t, $h, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
«q, k = F.elu(q) + 1, F.elu(k) + 1|q, k = q.softmax(-1), k.softmax(-2)|q, k = F.relu(q), F.relu(k)|q, k = q.exp().clamp_max(9), k.exp().clamp_max(9)|q, k = q, k / t|q, k = F.softplus(q), F.softplus(k)|q, k = q.sigmoid(), k.softmax(-2)|q, k = torch.cat([q, -q], -1).relu(), torch.cat([k, -k], -1).relu()»
«y = q @ (k.transpose(-1, -2) @ v)|y = torch.einsum("nhtd,nhde->nhte", q, torch.einsum("nhtd,nhte->nhde", k, v))|y = q @ (k.mT @ v) / ((q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True) + 1e-6)|y = torch.einsum("...td,...sd,...se->...te", q, k, v)|y = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2).mul(q.unsqueeze(-1)).sum(-2)»
return x + self.o(y.transpose(1, 2).reshape(n, t, -1))
## attention module
self.m = nn.MultiheadAttention($c, $h, batch_first=True«|, bias=False|, add_zero_attn=True|, kdim=$c, vdim=$c»)
--
return x + self.m(x, x, x«|, need_weights=False|, average_attn_weights=False»)[0]
## encoder layer
self.m = nn.TransformerEncoderLayer($c, $h, 20, batch_first=True«|, norm_first=True|, activation="gelu"|, dropout=0.0»)
--
return self.m(x)
## decoder layer
self.m = nn.TransformerDecoderLayer($c, $h, 20, batch_first=True)
--
return self.m(x, x.flip(1))
## learned queries
self.latent, self.k, self.v, self.o = nn.Parameter(torch.randn(3, $c)), nn.Linear($c, 8), nn.Linear($c, 8), nn.Linear(8, $c)
self.q = nn.Linear($c, 8)
--
q = self.q(self.latent)«|.expand(len(x), -1, -1)»
y = torch.softmax(q @ self.k(x).mT, -1) @ self.v(x)
return x + self.o(y).«mean(1, keepdim=True)|sum(1, True)|amax(1, keepdim=True)»
## memory
self.k, self.v = nn.Parameter(torch.randn(7, $c)), nn.Parameter(torch.randn(7, $c))
--
return x + (x @ self.k.T«| / math.sqrt(x.shape[-1])| / math.sqrt($c)»).softmax(-1) @ self.v
## class token
self.cls, self.a = nn.Parameter(torch.randn(1, 1, $c)), nn.Linear($c, $c)
--
y = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], «1|dim=1|axis=1|-2»)
y = y + torch.softmax(y @ y.mT, -1) @ self.a(y)
return y[:, 1:] + y[:, :1]
## learned positions
self.p, self.a = «nn.Parameter(torch.randn(1, 16, $c))|nn.Parameter(torch.randn(16, $c))», nn.Linear($c, $c)
--
return self.a(x + «self.p[..., : x.shape[1], :]|self.p.narrow(-2, 0, x.size(1))»)
## position embedding
self.p, self.a = nn.Embedding(16, $c), nn.Linear($c, $c)
--
return self.a(x + self.p(torch.arange(x.shape[1]))«|[None]»)
## sinusoidal positions
self.a = nn.Linear($c, $c)
«self.dim = $c|self.d_model = $c|self.h = $c»
--
d = «x.shape[-1]|self.__dict__.get('dim', $c)|$c»
f = torch.exp(torch.arange(0, d, 2, dtype=x.dtype) * (-math.log(100.0) / d))
a = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * f
return self.a(x + torch.cat([a.sin(), a.cos()], 1)[:, :d])
## sequence convolution
self.a, self.b = nn.Conv1d($c, $c, 3, padding=«1|"same"»«|, groups=$c|, groups=2»), nn.Linear($c, $c)
--
return x + self.b($act(self.a(x.«transpose(1, 2)|mT|permute(0, 2, 1)»).transpose(1, 2)))
## causal convolution
self.a = nn.Conv1d($c, $c, 3)
--
return $act(self.a(F.pad(x.transpose(1, 2), (2, 0)))).transpose(1, 2) + x
## mixing of tokens !
self.a, self.b, self.n = nn.Linear(6, 9), nn.Linear(9, 6), nn.LayerNorm($c)
--
return x + self.b($act(self.a(self.n(x).transpose(1, 2)))).transpose(1, 2)
## spatial gate !
self.a, self.s, self.b = nn.Linear($c, 20), nn.Linear(6, 6), nn.Linear(10, $c)
--
u, v = self.a(x).chunk(2, -1)
return x + self.b(u * self.s(v.transpose(1, 2)).transpose(1, 2))
## fourier mixing
self.a, self.n = nn.Linear($c, $c), nn.LayerNorm($c)
--
return self.a(self.n(x + torch.fft.«fft(torch.fft.fft(x, dim=-1), dim=1).real|fft(x, dim=1).real|fft2(x).real|irfft(torch.fft.rfft(x, dim=1) * 0.5, n=x.shape[1], dim=1)»))
## recurrent module
self.m = nn.«LSTM|GRU|RNN»($c, $c«|, num_layers=2»«|, bias=False», batch_first=True)
--
return x + self.m(x)[0]
## recurrent module, both ways
self.m, self.b = nn.«LSTM|GRU»($c, 5, bidirectional=True, batch_first=True), nn.Linear(10, $c)
--
pack, pad = nn.utils.rnn.pack_padded_sequence, nn.utils.rnn.pad_packed_sequence
return x + self.b(«self.m(x)[0]|pad(self.m(pack(x, [x.shape[1]] * len(x), True))[0], True)[0]|pad(self.m(pack(x, [x.shape[1]] * len(x), True))[0], True, 2.0)[0]»)
## recurrent module, last state
self.m, self.b = nn.«LSTM|GRU»($c, 7, batch_first=True), nn.Linear(7, $c)
--
first = torch.«zeros|ones»(1, len(x), «7|self.m.hidden_size»).to(x)
out, state = self.m(x«|, (first, first) if isinstance(self.m, nn.LSTM) else first»)
state = state[0] if isinstance(state, tuple) else state
return x + self.b(«state[-1]|out[:, -1]|state.transpose(0, 1)[:, 0]|state.squeeze(0)|out.mean(1)»).unsqueeze(1)
## recurrent cell
self.m, self.b = nn.«GRUCell|RNNCell»($c, 6), nn.Linear(6, $c)
--
h = x.new_zeros(len(x), 6)
out = []
for step in x.unbind(1):
    h = self.m(step, h)
    out.append(h)
return x + self.b(torch.stack(out, 1))
## lstm cell
self.m, self.b = nn.LSTMCell($c, 6), nn.Linear(6, $c)
--
state, out = None, []
for i in range(x.shape[1]):
    state = self.m(x[:, i], state)
    out += [state[0]]
return x + self.b(torch.stack(out, dim=1))
## lstm by hand
self.w, self.u, self.b = nn.Linear($c, 24), nn.Linear(6, 24, bias=False), nn.Linear(6, $c)
--
h, s, out = x.new_zeros(len(x), 6), x.new_zeros(len(x), 6), []
for step in x.unbind(1):
    i, f, g, o = (self.w(step) + self.u(h)).chunk(4, -1)
    s = f.sigmoid() * s + i.sigmoid() * g.tanh()
    h = o.sigmoid() * s.tanh()
    out.append(h)
return x + self.b(torch.stack(out, 1))
## state space scan
self.a, self.b, self.d = nn.Parameter(torch.rand($c)), nn.Linear($c, $c), nn.Linear($c, $c)
--
h, out, u = 0, [], self.b(x)
for i in range(x.size(1)):
    h = torch.sigmoid(self.a) * h + u[:, i]
    out.append(h)
return self.d(torch.stack(out, 1) * F.silu(x))
## cumulative
self.a = nn.Linear($c, $c)
--
return x + «self.a(x).cumsum(1)|torch.cumsum(self.a(x), dim=1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]|self.a(x).cummax(1)[0]|self.a(x) - F.pad(self.a(x), (0, 0, 1, 0))[:, :-1]|self.a(x).flip(1).cumsum(1).flip(1)|self.a(x).logcumsumexp(1)»
## norm by hand
self.a, self.g = nn.Linear($c, $c), nn.Parameter(torch.ones($c))
--
y = self.a(x)
«y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)|y = (y - y.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True) + 1e-5)|y = y / (y.norm(dim=-1, keepdim=True) * y.size(-1) ** -0.5 + 1e-6)|y = F.layer_norm(y, (y.shape[-1],))|y = F.rms_norm(y, y.shape[-1:])|y = F.normalize(y, dim=-1) * $c**0.5|y = y / y.abs().amax(-1, keepdim=True).clamp_min(1e-6)|y = (y.float() * torch.rsqrt(y.float().pow(2).mean(-1, True) + 1e-6)).to(y)|v, m = torch.var_mean(y, dim=-1, keepdim=True, correction=0); y = (y - m) * (v + 1e-5).rsqrt()|y = (y - y.mean(1, keepdim=True)) / (y.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()»
return x + self.g * y
## norms of heads
self.q, self.k, self.v, self.o = (nn.Linear($c, $c) for _ in range(4))
self.nq, self.nk = nn.«LayerNorm|RMSNorm»($c // $h), nn.«LayerNorm|RMSNorm»($c // $h)
--
n, t, _ = x.shape
q, k, v = (p(x).view(n, t, $h, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
return x + self.o(F.scaled_dot_product_attention(self.nq(q), self.nk(k), v).transpose(1, 2).flatten(2))
## adapter
self.a, self.u, self.d = nn.Linear($c, $c), nn.Linear($c, 3, bias=False), nn.Linear(3, $c, bias=False)
--
return self.a(x) + 0.5 * self.d(self.u(x))
## experts, best two
self.gate, self.experts = nn.Linear($c, 4), nn.ModuleList(nn.Sequential(nn.Linear($c, 6), nn.ReLU(), nn.Linear(6, $c)) for _ in range(4))
--
p, at = self.gate(x).softmax(-1).topk(2, -1)
y = torch.zeros_like(x)
for i, expert in enumerate(self.experts):
    w = (p * (at == i)).sum(-1, keepdim=True)
    «y = y + w * expert(x)|rows = w.squeeze(-1).nonzero(as_tuple=True); y[rows] += w[rows] * expert(x[rows])|flat = (w > 0).flatten().nonzero().squeeze(1); y = y.reshape(-1, x.shape[-1]).index_add(0, flat, w.flatten()[flat, None] * expert(x.flatten(0, 1)[flat])).view_as(x)»
return x + y
## experts in one tensor
self.gate, self.up, self.down = nn.Linear($c, 3), nn.Parameter(torch.randn(3, $c, 6) / 3), nn.Parameter(torch.randn(3, 6, $c) / 3)
--
g = self.gate(x).softmax(-1)
«y = torch.einsum("nte,ntef,efc->ntc", g, torch.einsum("ntc,ecf->ntef", x, self.up).relu(), self.down)|y = sum(g[..., i, None] * (F.relu(x @ self.up[i]) @ self.down[i]) for i in range(3))|y = torch.einsum("entc,nte->ntc", (x.unsqueeze(0) @ self.up[:, None]).relu() @ self.down[:, None], g)»
return x + y
## einsum
self.w, self.a = nn.Parameter(torch.randn($c, $h, $c // $h) / 3), nn.Linear($c, $c)
--
y = «torch.einsum("ntc,chd->nthd", x, self.w)|torch.einsum("...c,chd->...hd", x, self.w)|torch.einsum("bti,ijk->btjk", x, self.w)|torch.tensordot(x, self.w, 1)|torch.tensordot(x, self.w, dims=([2], [0]))|torch.einsum("n t c, c h d -> n t h d", x, self.w)|torch.einsum(x, [0, 1, 2], self.w, [2, 3, 4], [0, 1, 3, 4])»
return self.a(x + «y.flatten(2)|torch.einsum("nthd,chd->ntc", y, self.w)|torch.einsum("nthd,nshd->nths", y, y).sum(-1).repeat_interleave($c // $h, -1)|torch.einsum("nthd,nthe->ntde", y, y).mean((-1, -2)).unsqueeze(-1)|torch.einsum("nthd->nt", y)[..., None]|torch.einsum("nthd,nthd->nth", y, y).sum(-1, True)|torch.einsum("nihd,njhd->nhij", y, y).softmax(-1).mean(1) @ x|torch.einsum("nhtt->nht", y.transpose(1, 2) @ y.permute(0, 2, 3, 1)).mT.repeat(1, 1, $c // $h)»)
## tied with itself
self.a = nn.Linear($c, 10«|, bias=False»)
--
return x + «F.linear($act(self.a(x)), self.a.weight.T)|$act(self.a(x)) @ self.a.weight|F.linear($act(self.a(x)), self.a.weight.t())|torch.matmul($act(self.a(x)), self.a.weight.transpose(0, 1).mT)|F.linear(x, self.a.weight.T @ self.a.weight)|F.linear(x, self.a.weight[:5]).sum(-1, True)»
## matmul by hand
self.w, self.v, self.b = nn.Parameter(torch.randn($c, 10) / 3), nn.Parameter(torch.randn(10, $c) / 3), nn.Parameter(torch.randn(10))
--
y = «x @ self.w + self.b|torch.matmul(x, self.w)|torch.addmm(self.b, x.flatten(0, 1), self.w).view(*x.shape[:2], -1)|x.matmul(self.w).add(self.b)|torch.bmm(x, self.w.expand(len(x), -1, -1))|(x.unsqueeze(-1) * self.w).sum(-2)|torch.stack([x @ w for w in self.w.T], -1)|torch.stack([(x * w).sum(-1) for w in self.w.unbind(1)], -1)|torch.addmm(input=self.b, mat1=x.reshape(-1, $c), mat2=self.w).unflatten(0, x.shape[:2])|F.linear(x, self.w.mT, bias=self.b)|x.__matmul__(self.w)|torch.stack([row @ self.w for row in x])»
return x + $act(y) @ self.v
## batch norm over features
self.n, self.a = nn.BatchNorm1d($c), nn.Linear($c, $c)
--
return self.a(«self.n(x.transpose(1, 2)).transpose(1, 2)|self.n(x.flatten(0, 1)).view_as(x)|self.n(x.mT).mT»)
## pooled back
self.a, self.b = nn.Linear($c, 5), nn.Linear(5, $c)
--
y = self.a(x)
return x + self.b(«y.mean(1, keepdim=True)|y.amax(1, keepdim=True)|y[:, :1]|y[:, -1:]|y.sum(1, True) / y.shape[1]|y.max(1, keepdim=True).values|y.select(1, 0).unsqueeze(1)|y[:, y.shape[1] // 2, None]|y.sum(dim=1, keepdim=True) / len(y[0])|y.median(1, True)[0]|y[:, [0]]|torch.take_along_dim(y, y.argmax(1, keepdim=True), 1)|y.gather(1, x.new_zeros(len(x), 1, 5).long())|y[torch.arange(len(y)), -1].unsqueeze(1)|y.logsumexp(1, True)|y.cumsum(1)[:, -1:]»)
## pairs of tokens
self.a, self.b, self.d = nn.Linear($c, 6), nn.Linear($c, 6), nn.Linear(6, $c)
--
z = $act(self.a(x).unsqueeze(2) + self.b(x).unsqueeze(1))
return x + self.d(z.mean(«1|2»))
## low rank pairs
self.a, self.b = nn.Linear($c, 6), nn.Linear($c, 6)
--
return x * torch.sigmoid((self.a(x) * self.b(x)).sum(-1, keepdim=True)«| / 6| / self.a(x).size(-1)»)
## sorted tokens
self.a, self.s = nn.Linear($c, $c), nn.Linear($c, 1)
--
at = self.s(x).squeeze(-1).«argsort(1)|argsort(dim=-1, descending=True)|sort(1).indices»
return self.a(«torch.gather(x, 1, at.unsqueeze(-1).expand_as(x))|x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))|torch.take_along_dim(x, at[..., None], 1)|x[torch.arange(len(x))[:, None], at]»)
## padding masked
self.a = nn.Linear($c, $c)
--
y = self.a(x)
keep = (torch.arange(x.shape[1]) < x.shape[1] - 1 % x.shape[1])[None, :, None]
return x + «y * keep|y.masked_fill(~keep, 0.0)|torch.where(keep, y, torch.zeros_like(y))|torch.where(keep, y, 0.0)|y * keep.to(y)|y * keep.expand_as(y)»
## batch in the middle
self.a = nn.Linear($c, $c)
--
y = x.transpose(0, 1)
return (y + self.a(y)).«transpose(0, 1)|permute(1, 0, 2)|swapaxes(0, 1)»
## width split into two
self.a, self.b, self.d = nn.Linear($c // 2, $c // 2), nn.Linear($c // 2, $c // 2), nn.Linear($c, $c)
--
u, v = self.d(x).«chunk(2, -1)|split($c // 2, -1)|split([$c // 2, $c // 2], dim=-1)|unflatten(-1, (2, -1)).unbind(-2)|tensor_split(2, dim=2)»
return x + torch.cat([self.a(u), $act(self.b(v))], -1)
## coupling
self.a, self.b = nn.Linear($c // 2, $c // 2), nn.Linear($c // 2, $c // 2)
--
u, v = x.chunk(2, dim=-1)
return torch.cat([u, v * torch.exp(self.a(u).tanh()) + self.b(u)], dim=-1)
## counters
self.a = nn.Linear($c, $c)
self.register_buffer("steps", torch.zeros(1, dtype=torch.long))
--
«self.steps += 1|self.steps[0] = self.steps[0] + x.shape[1]|self.steps.fill_(x.shape[0])»
return x + self.a(x) * (1 + 0.1 * self.steps«|.to(x)»)
## codebook
self.a, self.book = nn.Linear($c, $c), nn.Parameter(torch.randn(5, $c))
--
y = self.a(x)
at = «torch.cdist(y, self.book.expand(len(y), -1, -1)).argmin(-1)|(y @ self.book.T).argmax(-1)|(y.unsqueeze(-2) - self.book).square().sum(-1).argmin(-1)»
return y + «F.embedding(at, self.book)|(F.embedding(at, self.book) - y).detach()|self.book[at]|torch.index_select(self.book, 0, at.flatten()).view_as(y)»
## limited length
self.a, self.dim = nn.Linear($c, $c), $c
self.«max_len|limit|window» = $c
--
x = x[:, : self.max_len] if hasattr(self, "max_len") else x[:, -$c:]
return x + self.a(x).view(«len(x), -1, self.dim|x.shape[0], x.shape[1], self.dim»)
"""

VECTORS = """
## linear
self.a, self.b, self.n = nn.Linear($c, 10), nn.Linear(10, $c), «nn.BatchNorm1d(10)|nn.LayerNorm(10)|nn.Identity()»
--
return $act(self.b($act(self.n(self.a(x)))))
## highway
self.a, self.g = nn.Linear($c, $c), nn.Linear($c, $c)
--
g = self.g(x).sigmoid()
return g * $act(self.a(x)) + (1 - g) * x
## cross
self.w, self.b = nn.Parameter(torch.randn($c)), nn.Parameter(torch.randn($c))
--
return x * «(x @ self.w)|(x * self.w).sum(-1)|torch.mv(x, self.w)|torch.einsum("nc,c->n", x, self.w)|F.linear(x, self.w[None])[:, 0]|x.inner(self.w)».unsqueeze(1) + self.b + x
## factorisation
self.v, self.a = nn.Parameter(torch.randn($c, 5)), nn.Linear($c, $c)
--
y = 0.5 * ((x @ self.v).pow(2) - (x**2) @ (self.v**2)).sum(1, keepdim=True)
return self.a(x) + y
## outer product
self.a, self.b, self.d = nn.Linear($c, 4), nn.Linear($c, 3), nn.Linear(12, $c)
--
u, v = self.a(x), self.b(x)
return self.d(«(u.unsqueeze(2) * v.unsqueeze(1)).flatten(1)|torch.einsum("ni,nj->nij", u, v).flatten(1)|torch.bmm(u[:, :, None], v[:, None]).view(len(x), -1)|(u[:, :, None] @ v[:, None, :]).reshape(len(x), 12)|torch.einsum("ni,nj->nji", u, v).flatten(1)|torch.stack([u * v[:, i : i + 1] for i in range(3)], 1).flatten(1)»)
## bilinear
self.m = nn.Bilinear($c, $c, $c)
--
return x + self.m(x, x)
## maxout
self.a = nn.Linear($c, 2 * $c)
--
return «self.a(x).view(-1, $c, 2).amax(-1)|self.a(x).view(-1, 2, $c).amax(1)|torch.maximum(*self.a(x).chunk(2, 1))|self.a(x).unflatten(1, (-1, 2)).max(-1)[0]»
## both signs
self.a, self.b = nn.Linear($c, 6), nn.Linear(12, $c)
--
y = self.a(x)
return self.b(torch.cat(«[y.relu(), (-y).relu()]|[y, -y]|[y.sin(), y.cos()]|[y, y * y]|[y, torch.zeros_like(y)]|[y, torch.ones_like(y)]», 1))
## weights from the input
self.a, self.b = nn.Linear($c, 4 * $c), nn.Linear(4, $c)
--
w = self.a(x).view(«len(x), 4, $c|-1, 4, $c|x.shape[0], 4, -1|len(x), -1, x.shape[1]»)
return self.b($act(«torch.bmm(w, x.unsqueeze(-1)).squeeze(-1)|(w @ x[..., None])[..., 0]|torch.einsum("noc,nc->no", w, x)|(w * x[:, None]).sum(-1)»))
## prototypes
self.p, self.a = nn.Parameter(torch.randn(7, $c)), nn.Linear(7, $c)
--
d = «torch.cdist(x, self.p)|(x[:, None] - self.p).pow(2).sum(-1)|x.pow(2).sum(1, True) - 2 * x @ self.p.T + self.p.pow(2).sum(1)|F.pairwise_distance(x[:, None], self.p[None])|(x.unsqueeze(1) - self.p).abs().mean(-1)|(x.unsqueeze(1) - self.p).norm(dim=-1)»
return self.a(torch.exp(-d))
## cosines
self.p, self.a = nn.Parameter(torch.randn(7, $c)), nn.Linear(7, $c)
--
return self.a(«F.linear(F.normalize(x), F.normalize(self.p))|F.normalize(x, dim=-1) @ F.normalize(self.p, dim=-1).T|F.cosine_similarity(x[:, None], self.p[None], dim=-1)|(x @ self.p.mT) / (x.norm(dim=1, keepdim=True) * self.p.norm(dim=1) + 1e-6)»)
## memory
self.k, self.v = nn.Linear($c, 9), nn.Linear(9, $c)
--
return x + self.v(self.k(x).softmax(-1))
## experts, first choice
self.gate, self.experts = nn.Linear($c, 3), nn.ModuleList(nn.Linear($c, $c) for _ in range(3))
--
«return sum(self.gate(x).softmax(-1)[:, [i]] * e(x) for i, e in enumerate(self.experts))|best = self.gate(x).argmax(-1); return torch.stack([self.experts[int(i)](r) for i, r in zip(best, x)])|return torch.stack([e(x) for e in self.experts], 1)[torch.arange(len(x)), self.gate(x).argmax(1)]|w = torch.stack([e.weight for e in self.experts]); return torch.einsum("nc,ne,edc->nd", x, self.gate(x).softmax(1), w)|hot = F.one_hot(self.gate(x).argmax(-1), 3).to(x); return torch.einsum("ne,end->nd", hot, torch.stack([e(x) for e in self.experts]))»
## two directions of one weight
self.w = nn.Parameter(torch.randn(9, $c) / 3)
--
y = $act(x @ self.w.T)
return «y @ self.w|F.linear(y, self.w.T)|y @ self.w - x @ (self.w.T @ self.w)|F.linear(y, -self.w.T)|y @ self.w[:, torch.arange($c - 1, -1, -1)]»
## square weight
self.w = nn.Parameter(torch.randn($c, $c) / 3)
--
return x + x @ «(self.w - self.w.T)|(self.w + self.w.mT) / 2|torch.matrix_exp(self.w * 0.1)|self.w.tril()|(self.w @ self.w.T)|(torch.eye($c, dtype=x.dtype) * self.w)|torch.linalg.inv(torch.eye($c, dtype=x.dtype) + 0.01 * self.w)|self.w.softmax(0)|(self.w * (1 - torch.eye($c, dtype=x.dtype)))|torch.block_diag(self.w[: $c // 2, : $c // 2], self.w[$c // 2 :, $c // 2 :])|torch.diag(self.w.diagonal())|self.w.T»
## polynomial
self.a, self.b, self.d = nn.Linear($c, 8), nn.Linear(8, $c), nn.Parameter(torch.randn(3))
--
y = self.a(x)
return self.b(self.d[0] + self.d[1] * y + self.d[2] * y**2)
## splines
self.a, self.k, self.b = nn.Linear($c, 5), nn.Parameter(torch.randn(5, 4)), nn.Linear(5, $c)
--
y = torch.exp(-(self.a(x)[..., None] - torch.linspace(-1, 1, 4, dtype=x.dtype)) ** 2)
return self.b(«(y * self.k).sum(-1)|torch.einsum("nik,ik->ni", y, self.k)»)
## a tree
self.a, self.leaf = nn.Linear($c, 3), nn.Parameter(torch.randn(4, $c))
--
d = self.a(x).sigmoid()
left, right = d[:, :1], 1 - d[:, :1]
p = torch.cat([left * d[:, 1:2], left * (1 - d[:, 1:2]), right * d[:, 2:], right * (1 - d[:, 2:])], 1)
return x + p @ self.leaf
## grid of units
self.a, self.b = nn.Linear($c, 12), nn.Linear(«4|3», $c)
--
y = self.a(x).view(-1, 3, 4)
return self.b(y.«sum|mean|amax|prod|logsumexp»(1 if self.b.in_features == 4 else 2))
## as an image
self.a, self.d, self.b = nn.Linear($c, 3 * 16), nn.Conv2d(3, 5, 3, padding=1), nn.Linear(5 * 16, $c)
--
y = $act(self.d(self.a(x).«view(-1, 3, 4, 4)|reshape(len(x), 3, 4, 4)|unflatten(1, (3, 4, 4))|view(len(x), -1, 4, 4)»))
return self.b(y.«flatten(1)|reshape(len(x), -1)|view(len(x), 80)»)
## as a signal
self.a, self.b = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 1, 3, padding=1)
--
return self.b($act(self.a(x.unsqueeze(1)))).squeeze(1)
## permuted
self.a, self.b = nn.Linear($c, 8), nn.Linear(8, $c)
self.register_buffer("order", torch.randperm(8))
--
y = self.a(x)
return self.b(«y[:, self.order]|y.index_select(1, self.order)|y[:, self.order[:4].repeat(2)]|torch.index_select(y, dim=1, index=self.order)|y.gather(1, self.order.expand(len(y), -1))|y.view(-1, 2, 4).transpose(1, 2).flatten(1)|y.flip(1)|y.roll(2, -1)|y[..., [7, 6, 5, 4, 3, 2, 1, 0]]|torch.scatter(torch.zeros_like(y), 1, self.order.expand(len(y), -1), y)|torch.zeros_like(y).index_add(1, self.order, y)|y.index_copy(1, self.order[:2], y[:, :2])|torch.cat([y[:, 4:], y[:, :4]], 1)|torch.vstack([y])|torch.hstack([y[:, :4], y[:, 4:]])|torch.column_stack([y])|y @ torch.eye(8, dtype=y.dtype)[self.order]»)
## fixed matrix
self.a, self.b = nn.Linear($c, 8), nn.Linear(8, $c)
self.register_buffer("fixed", torch.randn(8, 8))
--
y = self.a(x)
return self.b(«y @ self.fixed|F.linear(y, self.fixed)|y * self.fixed[0]|y + self.fixed.mean(0)|torch.addmm(y, y, self.fixed)|y - self.fixed[:, 0]|y @ self.fixed.tril()»)
## fixed constants
self.a, self.b = nn.Linear($c, 8), nn.Linear(8, $c)
self.shift = torch.«randn|ones»(8)
--
y = self.a(x)
return self.b(«y + self.shift.to(y)|y * self.shift.to(y)|torch.cat([y[:, :4], y[:, 4:] * self.shift[4:].to(y)], 1)|y - 1|y * 2.5 + 1|torch.where(self.shift > 0, y, -y)»)
## statistics
self.a, self.b = nn.Linear($c, 8), nn.Linear(3, $c)
--
y = self.a(x)
return x + self.b(torch.stack([«y.mean(1), y.std(1), y.amax(1)|y.sum(1), y.abs().sum(1), y.norm(dim=1)|y.min(1).values, y.median(1).values, y.max(1)[0]|y[:, 0], y[:, -1], y.prod(1).tanh()|y.var(1), y.logsumexp(1), y.argmax(1).to(y)|y.softmax(1).amax(1), (y > 0).sum(1).to(y), y.quantile(0.5, 1) if y.dtype in (torch.float32, torch.float64) else y.sum(1)|y.sum(1) / y.shape[1], y.pow(2).sum(1) / y.size(1), y.sum(1) / 8»], 1))
## over the batch
self.a, self.b = nn.Linear($c, 8), nn.Linear(8, $c)
--
y = self.a(x)
return self.b(«y - y.mean(0)|(y - y.mean(0, keepdim=True)) / (y.var(0, unbiased=False) + 1e-5).sqrt()|y + y.amax(0)|y.softmax(0)|y + y.cumsum(0)|y.flip(0)|y + y[:1]|y.roll(1, 0)|F.batch_norm(y, None, None, training=True) if len(y) > 1 else y»)
## lstm cell
self.m, self.b = nn.LSTMCell($c, 6), nn.Linear(6, $c)
--
return x + self.b(self.m(x)[«0|1»])
## hard steps
self.a, self.b = nn.Linear($c, 8), nn.Linear(8, $c)
--
y = self.a(x)
return self.b(«(y > 0).to(y)|y.sign()|y.round()|y + (y.sign() - y).detach()|(y > y.mean()).to(y) * y|y.floor()|F.hardtanh(y)|y.clamp(0, 1)|torch.bucketize(y, torch.tensor([-1.0, 0.0, 1.0])).to(y)|(y >= 0).float().to(y) * 2 - 1»)
## odd arithmetic
self.a, self.b = nn.Linear($c, 8), nn.Linear(8, $c)
--
y = self.a(x)
return self.b(«y / (1 + y.abs())|1 / (y.exp() + 1)|y ** 3 / 9|2 ** y.clamp(-3, 3)|(y + 1) * (y - 1)|y.abs().sqrt()|y.abs().log1p()|-y|y.neg().exp().clamp_max(4)|torch.erf(y)|y.asinh()|y * y.sigmoid() * 1.7|y.square() - y|torch.sinc(y)|y.logit(0.1)|torch.special.expit(y)|torch.logaddexp(y, -y)|torch.sub(y, 1, alpha=2)|torch.rsub(y, 1)|torch.true_divide(y, 3)|torch.float_power(y.abs(), 1.5).to(y)|y.frac()|y.deg2rad()|torch.exp2(y).clamp_max(4)|y.mul(2).div(3).add(1).sub(0.5)|y.positive()|y.reciprocal().clamp(-2, 2)|y // 1|y % 2|abs(y)|torch.celu(y) + 1|y.trunc()»)
## own function
self.a, self.b = nn.Linear($c, 8), nn.Linear(8, $c)
--
class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return «t.clamp(min=0)|t.round()|t * 2 + 1|t.cumsum(1)»

    @staticmethod
    def backward(ctx, g):
        return g

return self.b(Step.apply(self.a(x)))
## statements about gradients
self.a, self.b = nn.Linear($c, 8), nn.Linear(8, $c)
--
with torch.«no_grad()|enable_grad()|set_grad_enabled(False)»:
    y = self.a(x)
return self.b(«y|y.detach()|y + self.a(x)»)
## lists of layers
self.a = nn.ModuleList(nn.Linear($c // 4, «3|4») for _ in range(4))
self.b = nn.Linear(4 * self.a[0].out_features, $c)
--
return self.b(torch.cat([layer(part) for layer, part in zip(self.a, x.«chunk(4, -1)|split($c // 4, 1)|unflatten(1, (4, -1)).unbind(1)»)], «1|-1»))
## layers in a dict
self.a = nn.ModuleDict({"left": nn.Linear($c, 6), "right": nn.Linear($c, 6)})
self.b = nn.Linear(6, $c)
--
y = {name: layer(x) for name, layer in self.a.items()}
return self.b($act(y["left"]) * y["right"])
## a sequence of parts
self.a = nn.Sequential(OrderedDict(first=nn.Linear($c, 9), act=nn.«ReLU|GELU|Tanh|Softmax|LogSoftmax|Hardswish|LeakyReLU|SELU»(), drop=nn.Dropout(0.2), last=nn.Linear(9, $c)))
--
return «self.a(x)|x + self.a[:2](x).sum(1, True)|self.a.last(self.a.first(x))|self.a[3](self.a[0](x).relu())|x + self.a[-1](self.a.act(self.a.first(x)))»
"""
