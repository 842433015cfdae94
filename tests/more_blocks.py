# ruff: noqa: E501
"""More blocks for random networks, as source code, in the format of `random_blocks.py`."""

IMAGES = """
## first rows of a weight
self.w, self.b, self.d = nn.Parameter(torch.randn(2 * $c, $c + 4, 3, 3) / 9), nn.Parameter(torch.randn(2 * $c)), conv($c, $c)
--
return self.d($act(F.conv2d(x, self.w[: $c, : x.shape[1]], self.b[: $c], padding=1)))
## middle of a kernel
self.a, self.b = conv($c, $c), conv($c, $c)
--
return self.b($act(F.conv2d(x, self.a.weight[:, :, 1:2, 1:2]«, self.a.bias|», stride=1)))
## kernels added up
self.a, self.b, self.d = conv($c, $c), conv($c, $c, 1), conv($c, $c)
--
w = «self.a.weight + F.pad(self.b.weight, (1, 1, 1, 1))|self.a.weight + F.pad(self.b.weight, [1] * 4) + torch.eye($c, dtype=x.dtype)[:, :, None, None] * 0.1»
return self.d($act(F.conv2d(x, w, self.a.bias + self.b.bias, padding=1)))
## batch norm folded in the forward
self.a, self.n, self.d = conv($c, $c, bias=False), nn.BatchNorm2d($c), conv($c, $c)
--
s = self.n.weight / torch.sqrt(self.n.running_var + self.n.eps)
return self.d($act(F.conv2d(x, self.a.weight * s«.view(-1, 1, 1, 1)|.reshape(-1, 1, 1, 1)|[:, None, None, None]», self.n.bias - self.n.running_mean * s, padding=1)))
## low rank kernel
self.u, self.v, self.d = nn.Parameter(torch.randn($c, 4) / 2), nn.Parameter(torch.randn(4, $c) / 2), conv($c, $c)
--
w = «self.u @ self.v|torch.einsum("or,ri->oi", self.u, self.v)|F.linear(self.u, self.v.T)»
return self.d($act(F.conv2d(x, w«.view($c, $c, 1, 1)|.unsqueeze(-1).unsqueeze(-1)|.reshape(*w.shape, 1, 1)|[:, :, None, None]»)))
## weight norm by hand
self.v, self.g, self.d = nn.Parameter(torch.randn($c, $c, 3, 3) / 9), nn.Parameter(torch.rand($c, 1, 1, 1)), conv($c, $c)
--
w = self.g * «self.v / torch.linalg.vector_norm(self.v, dim=(1, 2, 3), keepdim=True)|F.normalize(self.v, dim=1)|F.normalize(self.v.flatten(1), dim=1).view_as(self.v)|self.v / self.v.flatten(1).norm(dim=1).view(-1, 1, 1, 1)|self.v / self.v.square().sum((1, 2, 3), keepdim=True).sqrt()»
return self.d($act(F.conv2d(x, w, padding=1)))
## norms by hooks
self.a, self.b, self.d = «nn.utils.weight_norm(conv($c, $c))|nn.utils.spectral_norm(conv($c, $c))|nn.utils.weight_norm(conv($c, $c), dim=None)|nn.utils.weight_norm(conv($c, $c), dim=1)», conv($c, $c), conv($c, $c)
--
return self.d($act(self.b($act(self.a(x)))))
## groups of a norm across a concatenation
self.a, self.b, self.n, self.d = conv($c, $c // 2 - 1), conv($c, $c // 2 + 1), nn.GroupNorm(«2|4|1», $c), conv($c, $c)
--
return self.d($act(self.n(torch.cat([self.a(x), self.b(x)], 1))))
## selective kernels
self.a, self.b, self.f, self.g = conv($c, $c), conv($c, $c), nn.Linear($c, 6), nn.Linear(6, 2 * $c)
--
y = torch.stack([self.a(x), $act(self.b(x))], 1)
s = self.g(self.f(y.sum(1).mean((2, 3))).relu()).view(«len(x), 2, -1|-1, 2, $c|x.shape[0], 2, x.shape[1]»).softmax(1)
return (y * s[..., None, None]).sum(1)
## linear modulation
self.a, self.f, self.d = conv($c, $c), nn.Linear($c, 2 * $c), conv($c, $c)
--
g, b = «self.f(x.mean((2, 3))).chunk(2, 1)|self.f(x.mean((2, 3))).split($c, -1)|self.f(x.mean((2, 3))).view(len(x), 2, -1).unbind(1)»
return self.d($act(self.a(x) * (1 + g[:, :, None, None]) + b[..., None, None]))
## adaptive instance norm
self.a, self.f, self.d = conv($c, $c), nn.Linear($c, 2 * $c), conv($c, $c)
--
y = «F.instance_norm(self.a(x))|F.group_norm(self.a(x), $c)|F.batch_norm(self.a(x), torch.zeros($c, dtype=x.dtype), torch.ones($c, dtype=x.dtype))»
m, s = self.f(x.amax((2, 3)))[:, :, None, None].chunk(2, 1)
return self.d($act(y * s + m))
## spatial modulation
self.n, self.a, self.b, self.d = «nn.BatchNorm2d($c, affine=False)|nn.InstanceNorm2d($c)|nn.GroupNorm(4, $c, affine=False)», conv($c, $c), conv($c, $c), conv($c, $c)
--
return self.d($act(self.n(x) * (1 + self.a(x)) + self.b(x)))
## written to computed places
self.a, self.d = conv($c, $c), conv($c, $c)
--
y = self.a(x).flatten(2)
at = «torch.arange(y.shape[2]).flip(0)|torch.arange(y.shape[2]) // 2|y[:, 0].argsort(-1)[:, None].expand_as(y)|torch.arange(y.shape[1])[None, :, None].expand_as(y)»
z = «torch.zeros_like(y).scatter_add(2, at.expand_as(y), y)|y.scatter(2, at.expand_as(y), y * 2)|torch.zeros_like(y).scatter_reduce(2, at.expand_as(y), y, "amax", include_self=False)|torch.scatter_add(y.new_zeros(y.shape), 2, at.expand_as(y), y)»
return self.d(z.view_as(x))
## added at indices
self.a, self.d = conv($c, $c), conv($c, $c)
--
y = self.a(x)
at = torch.arange(«y.shape[2]|y.size(2)») // 2
return self.d(torch.zeros_like(y).«index_add(2, at, y)|index_add_(2, at, y, alpha=0.5)|index_copy(2, torch.arange(y.size(2)), y)|index_put((torch.arange(len(y)),), y)|index_put_((torch.arange(len(y))[:, None], torch.arange(2)), y[:, :2], accumulate=True)»)
## picked by a mask
self.a, self.d = conv($c, $c), conv($c, $c)
--
y = self.a(x)
m = x.mean(1, keepdim=True) > 0
return self.d(«torch.zeros_like(y).masked_scatter(m.expand_as(y), y)|y.masked_fill(~m, 0.0)|y.masked_fill(m, 0.3)|torch.where(m, y, x)|torch.where(m, y, y.new_zeros(()))|y * m.float().to(y)|y.where(m, x * 0.1)|torch.where(m.expand_as(y), y, torch.full_like(y, -0.2))»)
## capsules
self.a, self.d = conv($c, $c), conv($c, $c)
--
n, c, h, w = x.shape
y = self.a(x).view(n, «-1, $c // 4|4, -1|$c // 4, 4», h, w)
s = y.square().sum(«2|1», keepdim=True)
return self.d((y * s / (1 + s) / (s + 1e-6).sqrt()).«view(n, c, h, w)|flatten(1, 2)»)
## blur
self.a, self.d = conv($c, $c), conv($c, $c)
self.register_buffer("k", torch.tensor([1.0, 2.0, 1.0])[:, None] * torch.tensor([1.0, 2.0, 1.0]) / 16)
--
y = self.a(x)
k = self.k.to(y)«[None, None].repeat(y.shape[1], 1, 1, 1)|.expand(y.shape[1], 1, 3, 3)|.expand($c, 1, -1, -1)|.repeat(y.size(1), 1, 1, 1)»
return self.d($act(F.conv2d(«y|F.pad(y, (0, 0, 0, 0))», k, padding=1, groups=y.shape[1])))
## wavelets
self.a, self.b, self.d = conv($c, $c), conv(4 * $c, $c, 1), nn.ConvTranspose2d($c, $c, 2, 2)
self.register_buffer("k", torch.randn(4, 1, 2, 2))
--
y = self.a(x)
n, c, h, w = y.shape
z = «F.conv2d(y.reshape(n * c, 1, h, w), self.k.to(y), stride=2).view(n, -1, h // 2, w // 2)|F.conv2d(y, self.k.to(y).repeat(c, 1, 1, 1), stride=2, groups=c)|F.conv2d(y.flatten(0, 1).unsqueeze(1), self.k.to(y), stride=2).unflatten(0, (n, c)).flatten(1, 2)»
return self.d(self.b(z))
## hierarchical splits
self.a, self.d = conv($c, $c, 1), conv($c, $c, 1)
self.m = nn.ModuleList(conv($c // 4, $c // 4) for _ in range(3))
--
parts = «self.a(x).chunk(4, 1)|torch.split(self.a(x), $c // 4, 1)|self.a(x).split([$c // 4] * 4, 1)|self.a(x).unflatten(1, (4, -1)).unbind(1)»
out, y = [parts[0]], parts[1]
for i, layer in enumerate(self.m):
    y = layer(y if i == 0 else y + parts[i + 1])
    out.append(y)
return self.d(torch.cat(out, 1))
## kernels of several sizes
self.a, self.b, self.e, self.d = conv($c, $c, 1), conv(3, 3, 3, groups=3), conv($c - 3, $c - 3, 5, groups=$c - 3), conv($c, $c, 1)
--
y, z = self.a(x).split([3, $c - 3], 1)
return self.d(torch.cat([self.b(y), $act(self.e(z))], 1))
## partial convolution
self.a, self.b, self.d = conv($c // 4, $c // 4), conv($c, 2 * $c, 1), conv(2 * $c, $c, 1)
--
«y, z = x.split([$c // 4, $c - $c // 4], 1); x = torch.cat([self.a(y), z], 1)|x = x.clone(); x[:, : $c // 4] = self.a(x[:, : $c // 4])|x = torch.cat([self.a(x[:, : $c // 4]), x[:, $c // 4 :]], dim=1)»
return x + self.d($act(self.b(x)))
## two resolutions
self.a, self.b, self.e, self.d = nn.Conv2d($c, 6, 3, 2, 1), conv(6, $c, 1), nn.Conv2d($c, 6, 3, 2, 1), conv(6, 6)
--
low = $act(self.a(x))
high = x + F.interpolate(self.b(low), size=x.shape[2:], mode="nearest")
low = self.d(low + self.e(high))
return high + F.interpolate(self.b(low), x.shape[2:])
## learned slopes by hand
self.a, self.b, self.s, self.t = conv($c, $c), conv($c, $c), nn.Parameter(torch.rand($c)), nn.Parameter(torch.rand($c, 1, 1))
--
y = self.a(x)
return self.b(«F.prelu(y, self.s)|torch.where(y > 0, y, self.t * y)|y.relu() - self.t * (-y).relu()|torch.max(y, self.t * y)|y * torch.sigmoid(self.t * y)|y.sign() * (y.abs() - self.t).relu()|(y + self.t) * self.s.exp()[:, None, None]|y.clamp(min=self.t)|torch.minimum(y, self.t)|y.abs().clamp_min(1e-3) ** self.t|F.prelu(weight=self.s, input=y)|y + torch.sin(self.t * y).square() / (self.t + 0.1)|self.t * y.relu() + (1 - self.t) * y|torch.addcmul(self.t, y, self.t)|torch.lerp(y, y.relu(), self.t)|y.mul(self.s.view(1, -1, 1, 1)).add_(self.t)|F.batch_norm(y, self.s, self.t.flatten() + 1)|(y > self.t) * y|(y > self.t).to(y) * x|(y - self.s[None, :, None, None]).tanh()»)
## statistics kept in buffers
self.a, self.b = conv($c, $c), conv($c, $c)
self.register_buffer("mean", torch.randn($c))
self.register_buffer("var", torch.rand($c))
self.w = nn.Parameter(torch.rand($c))
--
y = self.a(x)
if self.training:
    with torch.no_grad():
        self.mean.lerp_(y.mean((0, 2, 3)).to(self.mean), 0.1)
return self.b($act(self.w[:, None, None] * (y - self.mean[:, None, None].to(y)) * torch.rsqrt(self.var.to(y) + 1e-3)[:, None, None]))
## generalised mean
self.a, self.p, self.f = conv($c, $c), nn.Parameter(torch.ones(«1|$c, 1, 1») * 2), nn.Linear($c, $c)
--
y = self.a(x).clamp(min=1e-2).pow(self.p)
g = y.mean((2, 3), keepdim=True).pow(1 / self.p).flatten(1)
return x + self.f(g)[:, :, None, None]
## bilinear pooling
self.a, self.b, self.f = conv($c, 5, 1), conv($c, 4, 1), nn.Linear(20, $c)
--
u, v = self.a(x).flatten(2), self.b(x).flatten(2)
z = «torch.bmm(u, v.transpose(1, 2)).flatten(1)|torch.einsum("nip,njp->nij", u, v).reshape(len(x), -1)|(u @ v.mT).view(len(x), 20)» / u.shape[2]
z = «z|z.sign() * (z.abs() + 1e-3).sqrt()|F.normalize(z)»
return x + self.f(z)[:, :, None, None]
## coordinate attention
self.a, self.b, self.d = conv($c, 6, 1), conv(6, $c, 1), conv(6, $c, 1)
--
h, w = x.shape[2:]
y = torch.cat([x.mean(3, keepdim=True), x.mean(2, keepdim=True).transpose(2, 3)], 2)
u, v = $act(self.a(y)).split([h, w], 2)
return x * self.b(u).sigmoid() * self.d(v.permute(0, 1, 3, 2)).sigmoid()
## triplet attention
self.a, self.b = conv(2, 1), conv(2, 1)
--
y = x.permute(0, 2, 1, 3)
y = y * self.a(torch.cat([y.amax(1, keepdim=True), y.mean(1, keepdim=True)], 1)).sigmoid()
z = x * self.b(torch.cat([x.amax(1, keepdim=True), x.mean(1, keepdim=True)], 1)).sigmoid()
return (y.permute(0, 2, 1, 3) + z) / 2
## axial attention
self.q, self.k, self.v, self.o = (nn.Linear($c, $c) for _ in range(4))
--
n, c, h, w = x.shape
y = x.permute(0, 2, 3, 1)«|.transpose(1, 2)»
q, k, v = (p(y).unflatten(-1, ($h, -1)).transpose(2, 3) for p in (self.q, self.k, self.v))
z = self.o(F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(3))
return x + (z if z.shape[1] == h else z.transpose(1, 2)).permute(0, 3, 1, 2)
## cross-covariance attention
self.qkv, self.t, self.o = nn.Linear($c, 3 * $c), nn.Parameter(torch.ones($h, 1, 1)), nn.Linear($c, $c)
--
n, c, h, w = x.shape
q, k, v = self.qkv(x.flatten(2).mT).view(n, h * w, 3, $h, c // $h).permute(2, 0, 3, 4, 1).unbind(0)
a = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.t).softmax(-1)
return x + self.o((a @ v).permute(0, 3, 1, 2).reshape(n, h * w, c)).mT.reshape(n, c, h, w)
## recurrent convolution
self.a, self.b = conv($c + 5, 20), conv(5, $c)
--
h = s = x.new_zeros(len(x), 5, *x.shape[2:])
for _ in range(2):
    i, f, o, g = self.a(torch.cat([x, h], 1)).«chunk(4, 1)|split(5, 1)|view(len(x), 4, -1, *x.shape[2:]).unbind(1)»
    s = f.sigmoid() * s + i.sigmoid() * g.tanh()
    h = o.sigmoid() * s.tanh()
return x + self.b(h)
## ensemble by vmap
self.m = nn.ModuleList(conv($c, $c) for _ in range(3))
self.d = conv($c, $c)
--
p, b = torch.func.stack_module_state(list(self.m))
call = lambda p, b, x: torch.func.functional_call(self.m[0], (p, b), (x,))
return self.d(«torch.vmap(call, in_dims=(0, 0, None))(p, b, x).mean(0)|sum(m(x) for m in self.m) / 3|torch.stack([m(x) for m in self.m]).mean(0)|torch.stack([call({k: v[i] for k, v in p.items()}, {}, x) for i in range(3)]).amax(0)»)
## complex convolution
self.a, self.b, self.d = conv($c // 2, 5), conv($c // 2, 5), conv(10, $c)
--
u, v = x.chunk(2, 1)
return self.d(torch.cat([self.a(u) - self.b(v), self.a(v) + self.b(u)], 1))
## modules of torch
self.a, self.m, self.b = conv($c, $c), «nn.Softmax2d()|nn.Upsample(scale_factor=2)|nn.ZeroPad2d(1)|nn.ReflectionPad2d(1)|nn.ReplicationPad2d(1)|nn.ConstantPad2d(1, 0.5)|nn.CircularPad2d(1)|nn.ChannelShuffle(4)|nn.PReLU($c)|nn.Threshold(0.1, 0.2)|nn.LPPool2d(2, 2)|nn.FractionalMaxPool2d(2, output_ratio=0.5)|nn.AdaptiveMaxPool2d(3)|nn.AlphaDropout(0.2)|nn.Dropout2d(0.2)|nn.CELU()|nn.Hardshrink()|nn.UpsamplingBilinear2d(scale_factor=2)|nn.LocalResponseNorm(3)|nn.InstanceNorm2d($c, affine=True, track_running_stats=True)|nn.LayerNorm([8, 8])|nn.Sequential(nn.Flatten(1, 2), nn.Unflatten(1, ($c, -1)))|nn.Unfold(1)», conv($c, $c)
--
y = self.m(self.a(x))
return self.b(y if y.ndim == 4 else y.view(len(x), -1, *x.shape[2:]))
## norm over maps !
self.a, self.n, self.b = conv($c, $c), «nn.LayerNorm([$c, 8, 8])|nn.LayerNorm([8, 8])|nn.LayerNorm([8])|nn.GroupNorm($c, $c)|nn.LayerNorm([$c, 8, 8], elementwise_affine=False)», conv($c, $c)
--
return self.b($act(self.n(self.a(x))))
## grouped transposed convolution
self.a, self.b = nn.ConvTranspose2d($c, 8, 2, 2, groups=«2|4»), nn.Conv2d(8, $c, 2, 2, groups=«1|2»)
--
return self.b($act(self.a(x)))
## product of branches
self.a, self.b, self.d = conv($c, 6), conv($c, 6), conv(6, $c)
--
u, v = self.a(x), self.b(x)
return self.d(«torch.bmm(u.flatten(0, 1), v.flatten(0, 1)).view_as(u)|u @ v|torch.matmul(u, v.mT)|torch.einsum("nchw,ncwv->nchv", u, v)|torch.baddbmm(u.flatten(0, 1), u.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (len(x), -1))|u * v|torch.einsum("nchw,nchw->nchw", u, v)|(u.unsqueeze(-1) * v.unsqueeze(-2)).mean(-1)|torch.addcmul(x[:, :1], u, v, value=0.5)|torch.linalg.vecdot(u, v, dim=3)[..., None].expand_as(u)»)
## keys along channels
self.a, self.b, self.d = conv($c, 6, 1), conv($c, 6, 1), conv($c, $c, 1)
--
u, v = self.a(x).flatten(2), self.b(x).flatten(2)
z = «torch.einsum("nkp,nkq->npq", u, v)|torch.einsum("nkp,nkq->nqp", u, v).mT|torch.baddbmm(u.new_zeros(()), u.mT, v)|(u.mT.unsqueeze(2) * v.mT.unsqueeze(1)).sum(-1)|u.transpose(-1, -2).matmul(v)|torch.tensordot(u[0], v[0], dims=([0], [0]))[None]»
return x + (self.d(x).flatten(2) @ z.softmax(-1)).view_as(x)
## a branch with a limit
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = self.a(x)
x = x + «torch.where(x < 3, y, x)|torch.minimum(y, 3 - x)|y.masked_fill(x > 3, 1.0)|torch.where(x > 0, y, torch.zeros_like(y))|y * (x < 3)»
return $act(self.b(x))
## conditional layers
self.a = nn.ModuleDict({"0": conv($c, $c), "1": conv($c, 5)})
self.d = nn.ModuleDict({"1": conv(5, $c), "0": nn.Identity()})
--
k = str(int(x.shape[2] «> 8|<= 8|> 3»))
return x + self.d[k]($act(self.a[k](x)))
## rows of pixels as channels !
self.a, self.b = nn.Conv1d($c * 8, 10, 3, padding=1), nn.Conv1d(10, $c * 8, 1)
--
n, c, h, w = x.shape
y = x.«flatten(1, 2)|reshape(n, c * h, w)|view(n, -1, w)»
return x + self.b($act(self.a(y))).«view(n, c, h, w)|unflatten(1, (c, h))|view_as(x)»
## a video
self.a, self.t, self.b = conv($c, 6), nn.Conv3d(6, 6, (3, 1, 1), padding=(1, 0, 0)«|, groups=6|, groups=2»), conv(6, $c)
--
y = self.a(x)
z = self.t(y.«unsqueeze(0).transpose(1, 2)|transpose(0, 1)[None]|unflatten(0, (1, -1)).movedim(1, 2)»)
return self.b(z.«transpose(1, 2).flatten(0, 1)|squeeze(0).transpose(0, 1)|permute(0, 2, 1, 3, 4).reshape(y.shape)»)
## weight of another layer
self.a, self.b = conv($c, $c), conv($c, $c)
--
y = $act(self.a(x))
return «F.conv2d(y, self.b.weight, self.a.bias, padding=1)|F.conv2d(y, (self.a.weight + self.b.weight) / 2, padding=1)|self.b(y) + F.conv2d(x, self.b.weight[:, :, 1:, 1:], padding=1)[..., : x.shape[2], : x.shape[3]]|F.conv2d(y, self.b.weight.mean(0, keepdim=True), padding=1) + self.b(y)|F.conv2d(y, torch.cat([self.b.weight[: $c // 2], self.a.weight[$c // 2 :]]), padding=1)|self.b(y) * self.a.weight.abs().mean((1, 2, 3))[:, None, None]|self.b(y) * self.a.weight.norm()|self.b(y) + self.a.bias.view(-1, 1, 1)|F.conv2d(y, torch.where(self.a.weight > 0, self.a.weight, self.b.weight), padding=1)|F.conv2d(y, self.b.weight.roll(1, 0), padding=1)|F.conv2d(y, self.b.weight.rot90(1, (2, 3)), padding=1)|F.conv2d(y, self.b.weight.clamp(-1, 1), padding=1)|F.conv2d(y, self.b.weight.sign() * self.b.weight.abs().mean((1, 2, 3), keepdim=True), padding=1)|F.conv2d(y, self.b.weight / self.b.weight.abs().max(), padding=1)|F.conv2d(y, torch.stack([self.b.weight[:, i] for i in range($c)], 1), padding=1)|F.conv2d(y, self.b.weight.tanh(), self.b.bias.exp(), padding=1)|F.conv2d(y, (self.b.weight * 8).round() / 8, padding=1)|F.conv2d(y, self.b.weight.softmax(1), padding=1)|F.conv2d(y, self.b.weight.softmax(0), padding=1)»
## a head for every map
self.a, self.f = conv($c, $c), nn.ModuleList(conv($c, k, 1) for k in (2, 3, 4))
self.b = conv(9, $c)
--
y = $act(self.a(x))
return self.b(«torch.cat([f(y) for f in self.f], 1)|torch.cat([f(F.avg_pool2d(y, 2)) for f in self.f], 1).repeat_interleave(2, -1).repeat_interleave(2, -2)|torch.cat([t for f in reversed(self.f) for t in f(y).unbind(1)]).view(9, len(x), *x.shape[2:]).transpose(0, 1)»)
## one by one mixing
self.w, self.b = nn.Parameter(torch.randn($c, $c)), conv($c, $c)
--
w = «torch.linalg.qr(self.w)[0]|self.w|torch.matrix_exp(self.w - self.w.T)|self.w.tril(-1) + torch.eye($c, dtype=x.dtype)|torch.linalg.inv(self.w + 4 * torch.eye($c, dtype=x.dtype))»
return self.b(F.conv2d(x, w[:, :, None, None]))
## a forward of one's own
class Scaled(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight * «self.weight.shape[1] ** -0.5|self.in_channels ** -0.5|(2 / self.weight[0].numel()) ** 0.5|math.sqrt(2 / self.out_channels)|0.5», self.bias«|[:]|* 1», padding=1)

    def __call__(self, x):
        return super().__call__(x) * «2|1»

self.a, self.b = Scaled($c, $c, 3), Scaled($c, $c, 3)
--
return self.b($act(self.a(x)))
## gathered rows of a table
self.t, self.a, self.b = nn.Parameter(torch.randn(9, $c)), conv($c, $c), conv($c, $c)
self.register_buffer("at", torch.tensor([3, 1, 4]))
--
y = self.a(x)
g = «self.t[self.at].mean(0)|self.t[self.at[0]]|self.t.index_select(0, self.at).sum(0)|F.embedding(self.at, self.t).amax(0)|self.t[2:5].mean(0)|self.t[-1]|self.t.mean(0)|F.embedding_bag(self.at[None], self.t)[0]|self.t.gather(0, self.at[:1, None].expand(1, self.t.shape[1]))[0]»
return self.b(y * g[:, None, None])
"""

TOKENS = """
## multi-query attention
self.q, self.kv, self.o = nn.Linear($c, $c), nn.Linear($c, 2 * ($c // $h)), nn.Linear($c, $c)
--
n, t, c = x.shape
q = self.q(x).view(n, t, $h, -1).transpose(1, 2)
k, v = self.kv(x).«unsqueeze(1).chunk(2, -1)|chunk(2, -1)|split($c // $h, -1)»
k, v = (u if u.ndim == 4 else u[:, None] for u in (k, v))
y = «(q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v|F.scaled_dot_product_attention(q, k.expand(-1, $h, -1, -1), v.expand(-1, $h, -1, -1))|torch.einsum("nhts,nsd->nhtd", torch.einsum("nhtd,nsd->nhts", q, k[:, 0]).softmax(-1), v[:, 0])»
return x + self.o(y.transpose(1, 2).flatten(2))
## biases of attention
self.qkv, self.o = nn.Linear($c, 3 * $c), nn.Linear($c, $c)
self.table, self.slopes = nn.Parameter(torch.randn(31, $h)), nn.Parameter(torch.rand($h, 1, 1))
self.buckets = nn.Embedding(31, $h)
self.register_buffer("mask", torch.ones(16, 16).tril().bool().view(1, 1, 16, 16))
self.register_buffer("index", torch.arange(16)[:, None] - torch.arange(16) + 15)
self.register_buffer("alibi", 2.0 ** -torch.arange(1.0, $h + 1).view(-1, 1, 1))
--
n, t, c = x.shape
q, k, v = self.qkv(x).view(n, t, 3, $h, -1).permute(2, 0, 3, 1, 4)
at = self.index[:t, :t]
a = q @ k.mT / math.sqrt(q.size(-1))
«a = a + self.table[at].permute(2, 0, 1)|a = a + self.table[at.reshape(-1)].view(t, t, -1).permute(2, 0, 1).contiguous().unsqueeze(0)|a = a + self.buckets(at).permute(2, 0, 1)[None]|a = a - self.slopes * at.abs()|a = a - self.alibi.to(a) * at.abs()|a = a.masked_fill(~self.mask[:, :, :t, :t], float("-inf"))|a = torch.where(self.mask[..., :t, :t], a, torch.finfo(a.dtype).min)|a = a * self.slopes.exp().clamp(max=100)|a = a + 16 * torch.sigmoid(self.table[at]).permute(2, 0, 1)|a = a.masked_fill((at.abs() > 2), -1e4)|a = a + F.embedding(at, self.table).movedim(-1, 0)»
y = a.softmax(-1) @ v
return x + self.o(y.«transpose(1, 2).reshape(n, t, c)|transpose(1, 2).flatten(2)|permute(0, 2, 1, 3).reshape(n, t, -1)»)
## heads that talk
self.qkv, self.o, self.l, self.m = nn.Linear($c, 3 * $c), nn.Linear($c, $c), nn.Linear($h, $h), nn.Parameter(torch.randn($h, $h))
--
n, t, c = x.shape
q, k, v = self.qkv(x).view(n, t, 3, $h, -1).permute(2, 0, 3, 1, 4)
a = q @ k.mT
a = «self.l(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)|torch.einsum("nhts,hg->ngts", a.softmax(-1), self.m)|a.softmax(1)|a.softmax(-1) * self.m[0, :, None, None]|(a + a.mean(1, keepdim=True)).softmax(-1)»
return x + self.o((a @ v).transpose(1, 2).flatten(2))
## norms and scales of heads
self.qkv, self.o, self.n, self.s = nn.Linear($c, 3 * $c), nn.Linear($c, $c), «nn.LayerNorm($c // $h)|nn.RMSNorm($c // $h)», nn.Parameter(torch.rand($h, 1, 1))
self.g = nn.Linear($c, $h)
self.sub = nn.GroupNorm($h, $c)
--
n, t, c = x.shape
q, k, v = self.qkv(x).view(n, t, 3, $h, -1).permute(2, 0, 3, 1, 4)
q, k = self.n(q), self.n(k)
y = F.scaled_dot_product_attention(q, k, v)
y = «y * self.s|y * self.g(x).sigmoid().mT[..., None]|y * self.s.softmax(0)|y|F.normalize(y, dim=-1) * self.s»
y = y.transpose(1, 2).flatten(2)
return x + self.o(«y|self.sub(y.flatten(0, 1)).view_as(y)|self.sub(y.mT).mT»)
## relative keys
self.q, self.k, self.v, self.o, self.r = nn.Linear($c, $c), nn.Linear($c, $c), nn.Linear($c, $c), nn.Linear($c, $c), nn.Parameter(torch.randn(31, $c // $h))
self.u = nn.Parameter(torch.randn($h, $c // $h))
--
n, t, c = x.shape
q, k, v = (p(x).view(n, t, $h, -1) for p in (self.q, self.k, self.v))
at = torch.arange(t)[:, None] - torch.arange(t) + 15
a = torch.einsum("nthd,nshd->nhts", «q + self.u|q», k) + torch.einsum("nthd,tsd->nhts", q, self.r[at])
y = torch.einsum("nhts,nshd->nthd", a.softmax(-1), v)
return x + self.o(y.reshape(n, t, «-1|c»))
## joined keys
self.qkv, self.o, self.p = nn.Linear($c, 3 * $c), nn.Linear($c, $c), nn.Parameter(torch.randn(2, $h, 3, $c // $h))
--
n, t, c = x.shape
q, k, v = self.qkv(x).view(n, t, 3, $h, -1).permute(2, 0, 3, 1, 4)
k, v = (torch.cat([p.expand(n, -1, -1, -1), u], 2) for p, u in zip(self.p, (k, v)))
return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
## low rank additions
self.a, self.u, self.v, self.s = nn.Linear($c, $c), nn.Parameter(torch.randn($c, 3) / 3), nn.Parameter(torch.randn(3, $c) / 3), nn.Parameter(torch.rand($c))
self.b = nn.Linear($c, $c)
--
y = «self.a(x) + x @ self.v.T @ self.u.T|F.linear(x, self.a.weight + self.u @ self.v, self.a.bias)|self.a(x) + F.linear(F.linear(x, self.v), self.u) * 2|F.linear(x, self.a.weight * self.s[:, None], self.a.bias)|F.linear(x * self.s, self.a.weight)|F.linear(x, self.s.unsqueeze(-1) * F.normalize(self.a.weight + self.u @ self.v, dim=1))|self.a(x) * self.s|F.linear(x, torch.addmm(self.a.weight, self.u, self.v, alpha=0.5))|F.linear(x, torch.baddbmm(self.a.weight[None], self.u[None], self.v[None])[0])»
return self.b($act(y))
## routed to the best
self.r, self.up, self.down = nn.Linear($c, 4), nn.Parameter(torch.randn(4, $c, 6) / 3), nn.Parameter(torch.randn(4, 6, $c) / 3)
--
p = self.r(x).softmax(-1)
w, at = p.topk(2, -1)
«w = w / w.sum(-1, keepdim=True)|w = w»
y = «torch.einsum("ntc,ecd->nted", x, self.up)|torch.matmul(x.unsqueeze(1), self.up).transpose(1, 2)|torch.stack([x @ u for u in self.up], 2)»
y = torch.einsum("nted,edc->ntec", $act(y), self.down)
full = torch.zeros_like(p).scatter(-1, at, w)
return x + «(y * full.unsqueeze(-1)).sum(2)|torch.einsum("ntec,nte->ntc", y, full)|y.gather(2, at[..., None].expand(-1, -1, -1, y.shape[-1])).mul(w[..., None]).sum(2)»
## routed one by one
self.r, self.e = nn.Linear($c, 3), nn.ModuleList(nn.Sequential(nn.Linear($c, 5), nn.ReLU(), nn.Linear(5, $c)) for _ in range(3))
--
flat = x.flatten(0, 1)
w, at = self.r(flat).softmax(-1).«topk(1, -1)|topk(2, dim=-1)|max(-1, keepdim=True)»
y = torch.zeros_like(flat)
for i, e in enumerate(self.e):
    rows, slot = torch.where(at == i)
    «y.index_add_(0, rows, e(flat[rows]) * w[rows, slot, None])|y[rows] += e(flat[rows]) * w[rows, slot].unsqueeze(-1)»
return x + y.view_as(x)
## experts take tokens
self.r, self.e = nn.Linear($c, 3), nn.Parameter(torch.randn(3, $c, $c) / 3)
--
s = self.r(x).softmax(-1)
w, at = s.transpose(1, 2).topk(min(2, x.shape[1]), -1)
hot = F.one_hot(at, x.shape[1]).to(x)
y = torch.einsum("nekt,ntc->nekc", hot, x) @ self.e
return x + torch.einsum("nekt,nek,nekc->ntc", hot, w, y)
## decay
self.k, self.v, self.r, self.o, self.d, self.f = nn.Linear($c, $c), nn.Linear($c, $c), nn.Linear($c, $c), nn.Linear($c, $c), nn.Parameter(torch.rand($c)), nn.Parameter(torch.rand($c))
self.m = nn.Parameter(torch.rand(1, 1, $c))
--
past = F.pad(x, (0, 0, 1, -1))
y = x * self.m + past * (1 - self.m)
k, v, r = self.k(y).exp().clamp_max(9), self.v(y), self.r(y).sigmoid()
a = b = 0
out = []
for t in range(x.shape[1]):
    a, b = (-self.d.exp()).exp() * a + k[:, t] * v[:, t], (-self.d.exp()).exp() * b + k[:, t]
    out.append((a + self.f * k[:, t] * v[:, t]) / (b + 1e-3))
return x + self.o(r * torch.stack(out, 1))
## selective state space
self.i, self.w, self.dt, self.o = nn.Linear($c, 2 * $c), nn.Linear($c, 1 + 8), nn.Linear(1, $c), nn.Linear($c, $c)
self.conv = nn.Conv1d($c, $c, 3, groups=$c, padding=2)
self.A, self.D = nn.Parameter(torch.rand($c, 4)), nn.Parameter(torch.rand($c))
--
u, z = self.i(x).chunk(2, -1)
u = F.silu(self.conv(u.mT)[..., : x.shape[1]].mT)
d, b, c = self.w(u).split([1, 4, 4], -1)
d = F.softplus(self.dt(d))
a = torch.exp(d.unsqueeze(-1) * -self.A.exp())
bu = «d.unsqueeze(-1) * b.unsqueeze(2) * u.unsqueeze(-1)|torch.einsum("ntc,nts,ntc->ntcs", d, b, u)»
h, out = torch.zeros_like(bu[:, 0]), []
for t in range(x.shape[1]):
    h = a[:, t] * h + bu[:, t]
    out.append(«(h * c[:, t, None]).sum(-1)|torch.einsum("ncs,ns->nc", h, c[:, t])|(h @ c[:, t].unsqueeze(-1)).squeeze(-1)»)
return x + self.o((torch.stack(out, 1) + u * self.D) * F.silu(z))
## delta rule
self.q, self.k, self.v, self.b, self.o = nn.Linear($c, 5), nn.Linear($c, 5), nn.Linear($c, 6), nn.Linear($c, 1), nn.Linear(6, $c)
--
q, k, v, b = self.q(x), F.normalize(self.k(x), dim=-1), self.v(x), self.b(x).sigmoid()
s, out = x.new_zeros(len(x), 5, 6), []
for t in range(x.shape[1]):
    old = torch.einsum("nkv,nk->nv", s, k[:, t])
    s = s + torch.einsum("nk,nv->nkv", k[:, t], b[:, t] * (v[:, t] - old))
    out.append(torch.einsum("nkv,nk->nv", s, q[:, t]))
return x + self.o(torch.stack(out, 1))
## random features
self.q, self.k, self.v, self.o = nn.Linear($c, 4), nn.Linear($c, 4), nn.Linear($c, 6), nn.Linear(6, $c)
self.register_buffer("w", torch.randn(7, 4))
--
q, k = ((F.linear(u, self.w.to(u)) - u.square().sum(-1, keepdim=True) / 2).exp().clamp_max(9) for u in (self.q(x), self.k(x)))
return x + self.o(q @ (k.mT @ self.v(x)) / (q @ k.sum(1).unsqueeze(-1) + 1e-3))
## attention over neighbours
self.q, self.k, self.v, self.o = (nn.Linear($c, $c) for _ in range(4))
--
q, k, v = self.q(x), self.k(x), self.v(x)
k, v = (F.pad(u, (0, 0, 1, 1)).unfold(1, 3, 1) for u in (k, v))
a = torch.einsum("ntc,ntcw->ntw", q, k).softmax(-1)
return x + self.o(«torch.einsum("ntw,ntcw->ntc", a, v)|(v @ a.unsqueeze(-1)).squeeze(-1)|(a.unsqueeze(2) * v).sum(-1)»)
## pooled by attention
self.w, self.v, self.o = nn.Linear($c, 6), nn.Linear(6, 1), nn.Linear($c, $c)
--
a = self.v(self.w(x).tanh())«.softmax(1)|.squeeze(-1).softmax(-1).unsqueeze(-1)»
return x + self.o(«(a * x).sum(1, keepdim=True)|a.mT @ x|torch.bmm(a.transpose(1, 2), x)|torch.einsum("nto,ntc->noc", a, x)|F.linear(x.mT, a.squeeze(-1)[0]).unsqueeze(1)»)
## additive attention
self.q, self.k, self.s, self.v, self.o = nn.Linear($c, 6), nn.Linear($c, 6), nn.Linear(6, 1, bias=False), nn.Linear($c, 5), nn.Linear(5, $c)
--
e = self.s(torch.tanh(self.q(x)[:, :, None] + self.k(x)[:, None])).squeeze(-1)
return x + self.o(e.softmax(-1) @ self.v(x))
## pooled positions
self.e, self.p, self.a = nn.EmbeddingBag(9, $c, mode="«sum|mean|max»"), nn.Embedding(9, $c, padding_idx=0), nn.Linear($c, $c)
--
at = torch.arange(x.shape[1]) % 9
return self.a(x + «self.e(at[:, None])|self.p(at)|self.e(at.view(-1, 1).expand(-1, 2))|self.p(at).mean(0)|self.e(at, torch.tensor([0]))|self.p.weight[: x.shape[1] % 9 or 1].mean(0)|self.p.weight[at]|F.one_hot(at, 9).to(x) @ self.p.weight»)
## relative shift
self.q, self.r, self.o = nn.Linear($c, 6), nn.Linear($c, 6), nn.Linear($c, $c)
--
t = x.shape[1]
a = self.q(x) @ self.r(x).mT
a = F.pad(a, (1, 0)).reshape(len(x), t + 1, t)[:, 1:]
return x + a.softmax(-1) @ self.o(x)
## pyramid of tokens
self.a, self.b = nn.Linear(2 * $c, $c), nn.Linear($c, 2 * $c)
--
y = F.pad(x, (0, 0, 0, x.shape[1] % 2))
z = self.b($act(self.a(«y.reshape(len(x), -1, 2 * $c)|torch.cat([y[:, ::2], y[:, 1::2]], -1)|y.unflatten(1, (-1, 2)).flatten(2)»)))
return x + «z.reshape(len(x), -1, $c)|torch.stack(z.chunk(2, -1), 2).flatten(1, 2)|z.unflatten(2, (2, -1)).flatten(1, 2)»[:, : x.shape[1]]
## a queue of states
self.a, self.b = nn.Linear(3 * $c, $c), nn.Linear($c, $c)
--
h = [torch.zeros_like(x[:, 0])] * 2
out = []
for t in range(x.shape[1]):
    h.append(self.a(torch.cat([x[:, t], *h[-2:]], -1)).tanh())
    out.append(self.b(h[-1]))
return x + torch.stack(out, 1)
## gru by hand
self.w, self.u, self.b, self.o = nn.Parameter(torch.randn(3 * 6, $c) / 3), nn.Parameter(torch.randn(3 * 6, 6) / 3), nn.Parameter(torch.randn(18)), nn.Linear(6, $c)
--
h, out = x.new_zeros(len(x), 6), []
for t in range(x.size(1)):
    i, j = F.linear(x[:, t], self.w, self.b), h @ self.u.T
    (a, b, c), (d, e, f) = «i.chunk(3, 1), j.chunk(3, 1)|i.split(6, 1), j.split(6, 1)|i.view(-1, 3, 6).unbind(1), j.view(-1, 3, 6).unbind(1)»
    r, z = (a + d).sigmoid(), (b + e).sigmoid()
    h = (1 - z) * torch.tanh(c + r * f) + z * h
    out.append(h)
return x + self.o(torch.stack(out, 1))
"""

VECTORS = """
## masked weights
self.a, self.b = nn.Linear($c, 10), nn.Linear(10, $c)
self.register_buffer("m", (torch.arange(10)[:, None] % $c >= torch.arange($c)).float())
--
return self.b($act(F.linear(x, self.a.weight * self.m.to(x), self.a.bias)))
## positive weights
self.w, self.v, self.b = nn.Parameter(torch.randn(9, $c) / 3), nn.Parameter(torch.randn($c, 9) / 3), nn.Parameter(torch.randn(9))
--
return F.linear($act(F.linear(x, «self.w.exp()|F.softplus(self.w)|self.w.square()|self.w.abs()|self.w.softmax(1)|self.w / self.w.sum(1, keepdim=True).abs().clamp_min(1)|torch.cat([self.w[:4].abs(), self.w[4:]])|self.w.sigmoid() * self.w.tanh()|self.w.T.contiguous().mT|self.w - self.w.mean(0)|self.w - self.w.mean(1, True)|F.normalize(self.w)|F.normalize(self.w, dim=0)|F.layer_norm(self.w, self.w.shape[1:])», self.b)), self.v)
## largest of groups
self.a, self.b = nn.Linear($c, 12), nn.Linear(12, $c)
--
y = self.a(x)
return self.b(«y.view(len(x), -1, 2).sort(-1)[0].flatten(1)|y.view(-1, 6, 2).flip(-1).reshape(len(x), 12)|torch.cat([y.view(-1, 6, 2).amax(-1), y.view(-1, 6, 2).amin(-1)], 1)|torch.cat([torch.maximum(y[:, :6], y[:, 6:]), torch.minimum(y[:, :6], y[:, 6:])], 1)|y.view(-1, 2, 6).softmax(1).flatten(1)|(y.view(-1, 3, 4) / y.view(-1, 3, 4).norm(dim=2, keepdim=True).add(1)).flatten(1)|y.view(-1, 3, 4).sub(y.view(-1, 3, 4).mean(1, keepdim=True)).flatten(1)|F.group_norm(y, 3)|F.layer_norm(y.view(-1, 3, 4), (4,)).flatten(1)|y * y.view(-1, 3, 4).mean(2).repeat_interleave(4, 1).sigmoid()»)
## batch ensemble
self.a, self.r, self.s, self.b = nn.Linear($c, 9), nn.Parameter(torch.rand(3, $c)), nn.Parameter(torch.rand(3, 9)), nn.Linear(9, $c)
--
y = «(self.a(x[:, None] * self.r) * self.s)|self.a((x.unsqueeze(1) * self.r).flatten(0, 1)).view(len(x), 3, -1) * self.s|torch.stack([self.a(x * r) * s for r, s in zip(self.r, self.s)], 1)»
return self.b($act(y).mean(1))
## ensembles of linear maps
self.w, self.b, self.v = nn.Parameter(torch.randn(3, $c, 7) / 3), nn.Parameter(torch.randn(3, 7)), nn.Parameter(torch.randn(3, 7, $c) / 3)
--
y = «torch.einsum("nc,kcd->nkd", x, self.w)|torch.bmm(x.expand(3, -1, -1), self.w).transpose(0, 1)|(x @ self.w).transpose(0, 1)|torch.stack([x @ w for w in self.w], 1)|torch.tensordot(x, self.w, dims=([1], [1]))» + self.b
return «torch.einsum("nkd,kdc->nc", $act(y), self.v)|torch.bmm($act(y).transpose(0, 1), self.v).mean(0)|(y.relu().unsqueeze(2) @ self.v).squeeze(2).sum(1)|sum(y[:, i] @ v for i, v in enumerate(self.v))»
## mixture of densities
self.a, self.b = nn.Linear($c, 3 * 4), nn.Linear(4, $c)
--
m, s, p = self.a(x).«chunk(3, 1)|view(-1, 3, 4).unbind(1)|view(-1, 4, 3).unbind(2)»
return self.b(«p.softmax(1) * m * s.exp().clamp_max(4)|m + s * p|(p.softmax(1) * m).sum(1, keepdim=True) + s|F.softplus(s) * m + p»)
## feature masks
self.n, self.a, self.b, self.d = nn.BatchNorm1d($c), nn.Linear($c, $c), nn.Linear($c, 2 * 6), nn.Linear(6, $c)
--
y, prior, out = self.n(x), 1, 0
for _ in range(2):
    m = (self.a(y) * prior).softmax(1)
    prior = prior * (1.3 - m)
    out = out + F.glu(self.b(m * y), 1).relu()
return self.d(out)
## fields
self.f = nn.ModuleList(nn.Linear(1, 5) for _ in range(4))
self.b = nn.Linear(«6|10|5», $c)
--
e = torch.stack([f(x[:, i : i + 1]) for i, f in enumerate(self.f)], 1)
i, j = torch.triu_indices(4, 4, 1)
z = (e[:, i] * e[:, j]).sum(-1) if self.b.in_features == 6 else e[:, 0] if self.b.in_features == 5 else (e @ e.mT).flatten(1)[:, :10]
return x + self.b(z)
## two inputs of one product
self.a, self.b, self.m = nn.Linear($c, 7), nn.Linear($c, 5), nn.Bilinear(7, 5, $c)
--
return x + self.m(self.a(x), $act(self.b(x)))
## products of matrices
self.a, self.b, self.d, self.e = nn.Linear($c, 8), nn.Parameter(torch.randn(8, 6) / 3), nn.Parameter(torch.randn(6, 9) / 3), nn.Linear(9, $c)
--
y = self.a(x)
return self.e(«torch.linalg.multi_dot([y, self.b, self.d])|y @ (self.b @ self.d)|torch.chain_matmul(y, self.b, self.d)|F.linear(F.linear(y, self.b.T), self.d.T)|torch.addmm(self.d[0], y @ self.b, self.d)|torch.mm(y, self.b).mm(self.d)|torch.stack([torch.mv(self.d.T, self.b.T @ r) for r in y])|torch.einsum("na,ab,bc->nc", y, self.b, self.d)|torch.tensordot(y, self.b, 1) @ self.d|(y @ self.b).matmul(self.d)|torch.vstack([r @ self.b @ self.d for r in y])|torch.inner(y @ self.b, self.d.T)»)
## kronecker
self.u, self.v, self.a, self.b = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(4, 4) / 2), nn.Linear($c, 8), nn.Linear(8, $c)
--
y = self.a(x)
return self.b(«y @ torch.kron(self.u, self.v)|(y.view(-1, 2, 4) @ self.v).flatten(1)|torch.einsum("nij,ik,jl->nkl", y.view(-1, 2, 4), self.u, self.v).flatten(1)|(self.u @ y.view(-1, 2, 4)).flatten(1)|(self.u @ y.view(-1, 2, 4) @ self.v).reshape(len(x), 8)»)
## blocks of a matrix
self.a, self.w, self.b = nn.Linear($c, 8), nn.Parameter(torch.randn(4, 2, 3)), nn.Linear(12, $c)
--
y = self.a(x)
return self.b(«torch.einsum("ngi,gio->ngo", y.view(-1, 4, 2), self.w).flatten(1)|torch.bmm(y.view(-1, 4, 2).transpose(0, 1), self.w).transpose(0, 1).reshape(len(x), 12)|(y.view(-1, 4, 1, 2) @ self.w).flatten(1)|y @ torch.block_diag(*self.w)|torch.cat([p @ w for p, w in zip(y.chunk(4, 1), self.w)], 1)|torch.einsum("nig,gio->ngo", y.view(-1, 2, 4), self.w).flatten(1)»)
## symmetric pairs
self.a, self.b = nn.Linear($c, 4), nn.Linear(10, $c)
--
y = self.a(x)
i, j = torch.triu_indices(4, 4)
return self.b((y.unsqueeze(2) * y.unsqueeze(1))[:, i, j])
## gradients inside
self.a, self.b = nn.Linear($c, 8), nn.Linear(8, $c)
--
y = self.a(x)
return self.b(«torch.func.vmap(lambda r: r.tanh())(y)|y + 0 * torch.func.grad(lambda t: t.square().sum())(y.detach())|torch.func.jvp(torch.sin, (y,), (torch.ones_like(y),))[1]»)
## conditions
self.a, self.b, self.e = nn.Linear($c, 8), nn.Linear(8, $c), nn.Embedding(3, 16)
--
k = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
g, s = self.e(k).chunk(2, -1)
return self.b(«self.a(x) * g + s|self.a(x) * (1 + g) + s|self.a(x) * torch.eye(8, dtype=x.dtype)[k]|self.a(x) + F.one_hot(k, 8).to(x)|torch.where(k[:, None] > 0, self.a(x), g)»)
## hypernetwork
self.z, self.h, self.b = nn.Parameter(torch.randn(9, 3)), nn.Linear(3, $c + 1), nn.Linear(9, $c)
--
w = self.h(self.z)
return self.b($act(F.linear(x, w[:, :-1], w[:, -1])))
## spread to a larger vector
self.a, self.b = nn.Linear($c, 6), nn.Linear(«12|6|9», $c)
--
y = self.a(x)
k = self.b.in_features
z = F.pad(y, (k - 6, 0)) if k == 9 else y.repeat(1, k // 6)
return self.b($act(z«| * 2|.flip(1)|.roll(3, 1)»))
## running statistics by hand
self.a, self.b = nn.Linear($c, 8), nn.Linear(8, $c)
self.register_buffer("m", torch.randn(8))
self.register_buffer("s", torch.rand(8) + 0.5)
self.g, self.h = nn.Parameter(torch.rand(8)), nn.Parameter(torch.randn(8))
--
y = self.a(x)
m, s = (y.mean(0), y.std(0, unbiased=False) + 0.1) if self.training else (self.m.to(y), self.s.to(y))
return self.b($act((y - m) / s * self.g + self.h))
## solved by least squares
self.a, self.b, self.d = nn.Linear($c, 6), nn.Linear(6, $c), nn.Linear($c, 36)
--
y = self.a(x)
m = self.d(x).view(-1, 6, 6)
return x + self.b(«torch.linalg.solve(m @ m.mT + torch.eye(6, dtype=x.dtype), y)|(torch.linalg.inv(m @ m.mT + torch.eye(6, dtype=x.dtype)) @ y.unsqueeze(-1)).squeeze(-1)|torch.linalg.cholesky(m @ m.mT + torch.eye(6, dtype=x.dtype)).sum(-1) + y|(m.tril() @ y[..., None])[..., 0]|torch.diagonal(m, dim1=-2, dim2=-1) * y|m.sum(1) + y|torch.baddbmm(y[..., None], m, y[..., None]).squeeze(-1)|torch.linalg.matrix_norm(m)[:, None] * y»)
## neurons of both signs
self.a, self.b = nn.Linear($c, 8), nn.Linear(8, $c)
--
y = self.a(x)
return self.b(«F.silu(y[:, ::2]).repeat_interleave(2, 1)|torch.stack([y[:, :4], y[:, 4:]], 2).flatten(1)|torch.stack([y[:, ::2], -y[:, 1::2]], -1).flatten(1)|torch.cat([y[:, :4] * y[:, 4:], y[:, 4:]], 1)|y.view(-1, 2, 4).sum(1).repeat(1, 2)|torch.cat([y[:, 4:].sigmoid() * y[:, :4], y[:, :4].tanh()], 1)|torch.cat(y.split([3, 5], 1)[::-1], 1)|y.unfold(1, 2, 2).flip(2).reshape(len(x), 8)|y.view(-1, 4, 2).cumsum(2).flatten(1)|y.view(-1, 4, 2).cumsum(1).flatten(1)|torch.movedim(y.view(-1, 2, 4), 1, 2).reshape(len(x), 8)|y.reshape(-1, 8)[..., None].expand(-1, -1, 3).mean(-1)|y.diff(dim=1, prepend=y[:, :1])|F.max_pool1d(y.unsqueeze(1), 3, 1, 1).squeeze(1)|F.max_pool1d(y.unsqueeze(0), 2).squeeze(0).repeat(1, 2)|F.interpolate(y[:, None, :4], scale_factor=2)[:, 0]|F.conv1d(y[:, None], torch.ones(1, 1, 3, dtype=y.dtype), padding=1)[:, 0]»)
"""
