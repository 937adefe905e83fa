"""A Mixtral: RMSNorm, grouped-query attention with rotary positions, and a
SwiGLU mixture of experts (softmax over all experts, the best two, their weights
made to sum to 1). The rotary pairs are neighbours, (x0,x1) (x2,x3) ..., which is
what llama.cpp takes for the architecture "llama": no permutation on export."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

CONFIG = dict(vocab=4096, ctx=512, dim=256, layers=6, heads=4, kv_heads=2, head_dim=64,
              ff=256, experts=8, used=2, eps=1e-5, rope_base=10000.0)


def rms_norm(x, w, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def rope_table(cfg, n):
    inv = cfg["rope_base"] ** (-torch.arange(0, cfg["head_dim"], 2).float() / cfg["head_dim"])
    angle = torch.arange(n).float()[:, None] * inv[None]
    return angle.cos(), angle.sin()


def rope(x, cos, sin):  # x: batch, time, heads, head_dim
    x = x.unflatten(-1, (-1, 2))
    a, b = x[..., 0], x[..., 1]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class Experts(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        E, D, H = c["experts"], c["dim"], c["ff"]
        self.gate_inp = nn.Parameter(torch.randn(E, D) * 0.02)
        self.gate_up = nn.Parameter(torch.randn(E, 2 * H, D) * 0.03)
        self.down = nn.Parameter(torch.randn(E, D, H) * 0.03 / math.sqrt(2 * c["layers"]))
        self.counts = None  # tokens per expert of the last call
        self.chosen = None

    def forward(self, x):  # x: tokens, dim
        E, K, H = self.c["experts"], self.c["used"], self.c["ff"]
        logits = x @ self.gate_inp.t()
        probs = logits.softmax(-1)
        weight, chosen = probs.topk(K, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        # tokens sorted by expert: one pair of products for each expert
        flat = chosen.reshape(-1)
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=E)
        rows = torch.div(order, K, rounding_mode="floor")
        parts = x.index_select(0, rows).split(counts.tolist())
        out = []
        for xe, gu, dn in zip(parts, self.gate_up.unbind(0), self.down.unbind(0)):
            g, u = (xe @ gu.t()).split(H, -1)
            out.append((F.silu(g) * u) @ dn.t())
        out = torch.cat(out) * weight.reshape(-1).index_select(0, order)[:, None]
        y = torch.zeros_like(x).index_add(0, rows, out)
        # load balance (1 when even) and router z-loss
        share = counts.float() / flat.numel()
        balance = E * (share * probs.mean(0)).sum()
        z = torch.logsumexp(logits, -1).pow(2).mean()
        self.counts, self.chosen = counts, chosen
        return y, balance, z


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        D, Q, KV = c["dim"], c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
        self.attn_norm = nn.Parameter(torch.ones(D))
        self.qkv = nn.Parameter(torch.randn(Q + 2 * KV, D) * 0.03)
        self.out = nn.Parameter(torch.randn(D, Q) * 0.03 / math.sqrt(2 * c["layers"]))
        self.ffn_norm = nn.Parameter(torch.ones(D))
        self.experts = Experts(c)

    def forward(self, x, cos, sin, mask, drop):
        c, (B, T, D) = self.c, x.shape
        H, G, d = c["heads"], c["kv_heads"], c["head_dim"]
        h = rms_norm(x, self.attn_norm, c["eps"]) @ self.qkv.t()
        q, k, v = h.split((H * d, G * d, G * d), -1)
        q = rope(q.view(B, T, H, d), cos, sin).transpose(1, 2)
        k = rope(k.view(B, T, G, d), cos, sin).transpose(1, 2).repeat_interleave(H // G, 1)
        v = v.view(B, T, G, d).transpose(1, 2).repeat_interleave(H // G, 1)
        p = (torch.matmul(q * (1 / math.sqrt(d)), k.transpose(-1, -2)) + mask).softmax(-1)
        a = torch.matmul(p, v).transpose(1, 2).reshape(B, T, H * d) @ self.out.t()
        x = x + F.dropout(a, drop, self.training)
        y, balance, z = self.experts(rms_norm(x, self.ffn_norm, c["eps"]).view(B * T, D))
        return x + F.dropout(y.view(B, T, D), drop, self.training), balance, z


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embd = nn.Parameter(torch.randn(c["vocab"], c["dim"]) * 0.02)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["layers"]))
        self.norm = nn.Parameter(torch.ones(c["dim"]))

    def forward(self, ids, drop=0.0):
        """(logits, balance loss, z-loss); the embeddings are the output's too."""
        T = ids.shape[1]
        cos, sin = (t.to(ids.device) for t in rope_table(self.c, T))
        mask = torch.full((T, T), float("-inf"), device=ids.device).triu(1)
        x = F.dropout(F.embedding(ids, self.embd), drop, self.training)
        balance = z = 0.0
        for b in self.blocks:
            x, bl, zl = b(x, cos, sin, mask, drop)
            balance, z = balance + bl, z + zl
        n = self.c["layers"]
        return rms_norm(x, self.norm, self.c["eps"]) @ self.embd.t(), balance / n, z / n


def windows(ids, ctx=512):
    """Held-out text as windows of `ctx`: the start token, then ctx-1 tokens of
    text; every token of the text is predicted once. The last, short one is last."""
    return [torch.tensor([[0] + list(map(int, ids[i:i + ctx - 1]))])
            for i in range(0, len(ids), ctx - 1)]


@torch.no_grad()
def nll(model, ids, ctx=512, limit=None):
    """Mean negative log-likelihood a token, in nats."""
    model.eval()
    total = n = 0
    for w in windows(ids, ctx)[:limit]:
        w = w.to(model.embd.device)
        logits = model(w)[0]
        total += F.cross_entropy(logits[0, :-1], w[0, 1:], reduction="sum").item()
        n += w.shape[1] - 1
    model.train()
    return total / n
