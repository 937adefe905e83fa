"""A DeepSeekMoE (arXiv:2401.06066) as llama.cpp's architecture "deepseek" computes it: RMSNorm, grouped-query
attention with rotary positions on neighbouring pairs, and in every layer a shared expert beside many small routed ones:
softmax over all, the best few, *their weights as they are* (not made to sum to 1). Output and input share
embeddings."""
import math, os, sys
import torch
import torch.nn as nn
import torch.nn.functional as F
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "demo-model"))
from model import rope, rope_table  # the demo model's: the same rotary positions

CONFIG = dict(vocab=2816, ctx=512, dim=256, layers=4, heads=4, kv_heads=1, head_dim=64, ff=256, experts=32, used=4,
              shared=1, eps=1e-6, rope_base=10000.0)
# a dense Llama that guesses what the first one says; without experts the shared one is all there is
CONFIGS = dict(fine=CONFIG, deep=dict(CONFIG, layers=14, heads=8, head_dim=32, ff=64),
               draft=dict(CONFIG, dim=192, layers=2, heads=3, ff=384, experts=0, used=0))


def grouped(x, gate_up, down, counts):
    """Every expert's rows in two grouped products (bf16)."""
    ends = counts.cumsum(0).to(torch.int32)
    g, u = torch._grouped_mm(x, gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    return torch._grouped_mm(F.silu(g) * u, down.transpose(1, 2), offs=ends)


def padded(x, gate_up, down, counts):
    """Every expert's rows padded to the longest, in two batched products: no row is dropped."""
    E, longest = len(counts), int(counts.max())
    starts = counts.cumsum(0) - counts
    at = torch.repeat_interleave(torch.arange(E, device=x.device) * longest - starts, counts, output_size=len(x)) \
        + torch.arange(len(x), device=x.device)
    wide = x.new_zeros(E * longest, x.shape[1]).index_copy(0, at, x).view(E, longest, -1)
    g, u = torch.bmm(wide, gate_up.transpose(1, 2)).chunk(2, -1)
    return torch.bmm(F.silu(g) * u, down.transpose(1, 2)).flatten(0, 1).index_select(0, at)


def one_by_one(x, gate_up, down, counts):
    out = []
    for xe, gu, dn in zip(x.split(counts.tolist()), gate_up.unbind(0), down.unbind(0)):
        g, u = (xe @ gu.t()).chunk(2, -1)
        out.append((F.silu(g) * u) @ dn.t())
    return torch.cat(out)


class EachInPlace(torch.autograd.Function):
    """The sum over a token's experts in F32, for a CPU: each expert's rows are gathered, weighted where they are
    narrow, and added where they belong, so that no tensor has all rows at once. Backward by hand, because autograd
    would add 32 gradients as large as `x`."""

    @staticmethod
    def forward(ctx, x, weight, gate_up, down, rows, counts):
        y, kept = torch.zeros_like(x), []
        for r, w, gu, dn in zip(rows.split(counts), weight[:, None].split(counts), gate_up, down):
            xe = x.index_select(0, r)
            g, u = (xe @ gu.t()).chunk(2, -1)
            s = torch.sigmoid(g)
            y.index_add_(0, r, (g * s * u * w) @ dn.t())
            kept += [xe, g, u, s]
        ctx.save_for_backward(weight, gate_up, down, rows, *kept)
        ctx.counts = counts
        return y

    @staticmethod
    def backward(ctx, dy):
        weight, gate_up, down, rows, *kept = ctx.saved_tensors
        dx, dgate_up, ddown, dweight = torch.zeros_like(dy), torch.empty_like(gate_up), torch.empty_like(down), []
        for e, (r, w) in enumerate(zip(rows.split(ctx.counts), weight[:, None].split(ctx.counts))):
            xe, g, u, s = kept[4 * e:4 * e + 4]
            silu, de = g * s, dy.index_select(0, r)
            hidden, back = silu * u, de @ down[e]
            torch.mm(de.t(), hidden * w, out=ddown[e])
            dweight.append((back * hidden).sum(1))
            back *= w
            wide = torch.cat((back * u * (s + silu * (1 - s)), back * silu), 1)
            torch.mm(wide.t(), xe, out=dgate_up[e])
            dx.index_add_(0, r, wide @ gate_up[e])
        return dx, torch.cat(dweight), dgate_up, ddown, None, None


def attention(q, k, v):
    if q.is_cuda or not torch.is_autocast_enabled("cpu"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # on a CPU in bf16 twice as fast as torch's own, for windows this short
    T = q.shape[2]
    later = torch.full((T, T), -1e4, dtype=q.dtype).triu(1).expand(q.shape[0] * q.shape[1], T, T)
    with torch.autocast("cpu", enabled=False):
        s = torch.baddbmm(later, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=1 / math.sqrt(q.shape[3]))
        return (s.softmax(-1) @ v.flatten(0, 1)).view(q.shape)


class Shared(nn.Module):
    """The SwiGLU that every token goes through; with the losses of a router that is not there."""
    counts = torch.zeros(0)

    def __init__(self, c):
        super().__init__()
        self.c = c
        D, S = c["dim"], c["ff"] * c["shared"]
        self.shared_gate_up = nn.Parameter(torch.randn(2 * S, D) / math.sqrt(D))
        self.shared_down = nn.Parameter(torch.randn(D, S) / math.sqrt(S * 2 * c["layers"]))

    def forward(self, x):
        g, u = (x @ self.shared_gate_up.t()).chunk(2, -1)
        return (F.silu(g) * u) @ self.shared_down.t(), x.new_zeros(()), x.new_zeros(())


class Experts(Shared):
    products = staticmethod(one_by_one)  # what train.py found to work in bf16; F32 always goes one by one

    def __init__(self, c):
        super().__init__(c)
        E, D, H = c["experts"], c["dim"], c["ff"]
        out = 1 / math.sqrt(H * 2 * c["layers"])
        self.gate_inp = nn.Parameter(torch.randn(E, D) * 0.02)
        self.gate_up = nn.Parameter(torch.randn(E, 2 * H, D) / math.sqrt(D))
        # a router weight is about 1/E at first, and `used` of them are added up
        self.down = nn.Parameter(torch.randn(E, D, H) * out * E / c["used"] / 2)
        self.counts = None  # tokens per expert of the last call

    def forward(self, x):  # x: tokens, dim
        E, K = self.c["experts"], self.c["used"]
        with torch.autocast(x.device.type, enabled=False):
            logits = x.float() @ self.gate_inp.t()
        probs = logits.softmax(-1)
        weight, chosen = probs.topk(K, -1)
        flat = chosen.reshape(-1)
        order = flat.argsort()
        counts = torch.zeros(E, dtype=torch.long, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
        half = torch.is_autocast_enabled(x.device.type)
        rows = torch.div(order, K, rounding_mode="floor")
        if half:
            wide, gate_up, down = (t.to(torch.bfloat16) for t in (x, self.gate_up, self.down))
            out = self.products(wide.index_select(0, rows), gate_up, down, counts)
            back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=x.device))
            y = (out.index_select(0, back).view(len(x), K, -1) * weight[..., None]).sum(1)
        else:
            flat_weight = weight.reshape(-1).index_select(0, order)
            y = EachInPlace.apply(x, flat_weight, self.gate_up, self.down, rows, counts.tolist())
        y = y + super().forward(x)[0]
        # load balance over the whole batch (1 when even) and router z-loss
        balance = E * (counts.float() / flat.numel() * probs.mean(0)).sum()
        z = torch.logsumexp(logits, -1).pow(2).mean()
        self.counts = counts
        return y, balance, z


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        D, Q, KV = c["dim"], c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
        self.attn_norm = nn.Parameter(torch.ones(D))
        self.qkv = nn.Parameter(torch.randn(Q + 2 * KV, D) / math.sqrt(D))
        self.out = nn.Parameter(torch.randn(D, Q) / math.sqrt(Q * 2 * c["layers"]))
        self.ffn_norm = nn.Parameter(torch.ones(D))
        self.experts = (Experts if c["experts"] else Shared)(c)

    def forward(self, x, cos, sin, drop):
        c, (B, T, D) = self.c, x.shape
        H, G, d = c["heads"], c["kv_heads"], c["head_dim"]
        h = F.rms_norm(x, (D,), self.attn_norm, c["eps"]) @ self.qkv.t()
        q, k, v = h.split((H * d, G * d, G * d), -1)
        q = rope(q.view(B, T, H, d), cos, sin).to(v.dtype).transpose(1, 2)
        k = rope(k.view(B, T, G, d), cos, sin).to(v.dtype).transpose(1, 2)
        v = v.view(B, T, G, d).transpose(1, 2)
        k, v = (t.repeat_interleave(H // G, 1) for t in (k, v))
        a = attention(q, k, v).transpose(1, 2).reshape(B, T, H * d)
        x = x + F.dropout(a @ self.out.t(), drop, self.training)
        y, balance, z = self.experts(F.rms_norm(x, (D,), self.ffn_norm, c["eps"]).view(B * T, D))
        return x + F.dropout(y.view(B, T, D), drop, self.training), balance, z


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embd = nn.Parameter(torch.randn(c["vocab"], c["dim"]) * 0.02)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["layers"]))
        self.norm = nn.Parameter(torch.ones(c["dim"]))
        for name, t in zip(("cos", "sin"), rope_table(c, c["ctx"])):
            self.register_buffer(name, t, persistent=False)

    def forward(self, ids, drop=0.0):
        """(logits, balance loss, z-loss)"""
        T = ids.shape[1]
        x = F.dropout(F.embedding(ids, self.embd), drop, self.training)
        balance = z = 0.0
        for b in self.blocks:
            x, bl, zl = b(x, self.cos[:T], self.sin[:T], drop)
            balance, z = balance + bl, z + zl
        n = self.c["layers"]
        return F.rms_norm(x, (self.c["dim"],), self.norm, self.c["eps"]) @ self.embd.t(), balance / n, z / n


def fastest_products(device, c=CONFIG):
    """The first of the ways to multiply by experts that gives, in bf16, what one_by_one gives, backwards too:
    `_grouped_mm` is a private function of torch and may be missing or refuse a device."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, c["dim"], generator=g)
    wide = torch.randn(c["experts"], 2 * c["ff"], c["dim"], generator=g) / 16
    down = torch.randn(c["experts"], c["dim"], c["ff"], generator=g) / 16
    counts = torch.bincount(torch.randint(c["experts"] - 1, (512,), generator=g), minlength=c["experts"]).to(device)

    def run(way):
        leaves = [t.to(device, torch.bfloat16).requires_grad_() for t in (x, wide, down)]
        out = way(*leaves, counts)
        out.float().pow(2).sum().backward()
        return [out.detach().float()] + [t.grad.float() for t in leaves]

    want = run(one_by_one)
    for way in (grouped, padded):
        try:
            off = max(((a - b).norm() / b.norm()).item() for a, b in zip(run(way), want))
            if off < 0.03:
                return way
            print(f"{way.__name__}: off by {off:.3f}")
        except Exception as e:  # whatever it is, there is another way
            print(f"{way.__name__}: {type(e).__name__}: {e}")
    return one_by_one
