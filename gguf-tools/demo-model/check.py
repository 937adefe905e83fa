#!/usr/bin/env python3
"""Reads a GGUF of the demo model, of the fine-grained one or of its draft back, and computes with numpy alone,
from the file alone (weights, hyperparameters, vocabulary and merges): held-out perplexity, how often a draft's
best token is the model's, which expert takes how many tokens, what swapping two experts does, and greedy
completions. It shares no code with the trainer, so a mistake on export shows as a perplexity
that differs from the trainer's."""
import argparse, re
import numpy as np
import gguf


def byte_table():
    """GPT-2's letters for bytes."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, n = {b: chr(b) for b in keep}, 0
    for b in range(256):
        if b not in table:
            table[b], n = chr(256 + n), n + 1
    return table


class Tokenizer:
    def __init__(self, tokens, merges):
        self.tokens, self.ids = tokens, {t: i for i, t in enumerate(tokens)}
        self.rank = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
        self.enc = byte_table()
        self.dec = {v: k for k, v in self.enc.items()}
        # GPT-2's expression; the texts are ASCII but for a few letters
        self.split = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?\d+"
                                r"| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
        self.cache = {}

    def word(self, w):
        if w not in self.cache:
            s = [self.enc[b] for b in w.encode()]
            while len(s) > 1:
                r, i = min((self.rank.get((s[i], s[i + 1]), 1 << 30), i)
                           for i in range(len(s) - 1))
                if r == 1 << 30:
                    break
                s[i:i + 2] = [s[i] + s[i + 1]]
            self.cache[w] = [self.ids[t] for t in s]
        return self.cache[w]

    def encode(self, text):
        return [i for w in self.split.findall(text) for i in self.word(w)]

    def decode(self, ids):
        return bytes(self.dec[ch] for i in ids if i for ch in self.tokens[i]).decode(errors="replace")


class Gguf:
    def __init__(self, path):
        r = gguf.GGUFReader(path)
        f = {k: v.contents() for k, v in r.fields.items()}
        arch = f["general.architecture"]
        g = lambda k: f[arch + "." + k]
        assert arch in ("llama", "deepseek"), arch
        # Mixtral makes the chosen experts' weights sum to 1, DeepSeek takes them as they are
        self.sum_to_one = arch == "llama"
        self.heads, self.kv = g("attention.head_count"), g("attention.head_count_kv")
        self.layers, self.eps = g("block_count"), g("attention.layer_norm_rms_epsilon")
        self.experts, self.used = (f.get(f"{arch}.expert_{k}count", 0) for k in ("", "used_"))  # 0: a dense model
        self.base, self.hd = g("rope.freq_base"), g("rope.dimension_count")
        self.ctx, self.bos = g("context_length"), f["tokenizer.ggml.bos_token_id"]
        self.tok = Tokenizer(f["tokenizer.ggml.tokens"], f["tokenizer.ggml.merges"])
        self.w = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
                  for t in r.tensors}
        self.counts = np.zeros((self.layers, self.experts), np.int64)
        self.weighed = None  # by layer: pairs of a chosen expert's weight and the length of what it adds

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.w[name]

    def rope(self, x):  # time, heads, head_dim; pairs of neighbours
        T = len(x)
        inv = self.base ** (-np.arange(0, self.hd, 2) / self.hd)
        angle = np.outer(np.arange(T), inv)[:, None]
        c, s = np.cos(angle), np.sin(angle)
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * c - x[..., 1::2] * s
        out[..., 1::2] = x[..., 0::2] * s + x[..., 1::2] * c
        return out

    def ffn(self, h, layer, kind, e=...):
        gate, up, down = (self.w[f"{layer}ffn_{n}{kind}.weight"][e] for n in ("gate", "up", "down"))
        g = h @ gate.T
        return (g / (1 + np.exp(-g)) * (h @ up.T)) @ down.T

    def logits(self, ids):
        w, T = self.w, len(ids)
        x = w["token_embd.weight"][ids]
        mask = np.triu(np.full((T, T), -np.inf, np.float32), 1)
        for l in range(self.layers):
            p = f"blk.{l}."
            h = self.norm(x, p + "attn_norm.weight")
            q = self.rope((h @ w[p + "attn_q.weight"].T).reshape(T, self.heads, -1))
            k = self.rope((h @ w[p + "attn_k.weight"].T).reshape(T, self.kv, -1))
            v = (h @ w[p + "attn_v.weight"].T).reshape(T, self.kv, -1)
            a = np.empty_like(q)
            for i in range(self.heads):
                j = i // (self.heads // self.kv)
                s = q[:, i] @ k[:, j].T / np.sqrt(self.hd) + mask
                s = np.exp(s - s.max(-1, keepdims=True))
                a[:, i] = s / s.sum(-1, keepdims=True) @ v[:, j]
            x = x + a.reshape(T, -1) @ w[p + "attn_output.weight"].T
            h = self.norm(x, p + "ffn_norm.weight")
            if not self.experts:
                x = x + self.ffn(h, p, "")
                continue
            r = h @ w[p + "ffn_gate_inp.weight"].T
            r = np.exp(r - r.max(-1, keepdims=True))
            r /= r.sum(-1, keepdims=True)
            top = np.argsort(-r, -1, kind="stable")[:, :self.used]
            rw = np.take_along_axis(r, top, -1)
            if self.sum_to_one:
                rw /= rw.sum(-1, keepdims=True)
            y = self.ffn(h, p, "_shexp") if p + "ffn_up_shexp.weight" in w else np.zeros_like(x)
            for e in range(self.experts):
                t, slot = np.nonzero(top == e)
                self.counts[l, e] += len(t)
                added = self.ffn(h[t], p, "_exps", e) * rw[t, slot][:, None]
                y[t] += added
                if self.weighed is not None:
                    self.weighed[l].append(np.stack([rw[t, slot], np.sqrt((added * added).sum(-1))]))
            x = x + y
        return self.norm(x, "output_norm.weight") @ w["token_embd.weight"].T

    def log_probs(self, ids, ctx):
        """Windows of `ctx` tokens, the first of each the start token: every token of the text is predicted once.
        For each window, yields the predicted tokens and the logarithms of the probabilities."""
        for i in range(0, len(ids), ctx - 1):
            part = ids[i:i + ctx - 1]
            z = self.logits([self.bos] + part)[:-1].astype(np.float64)
            m = z.max(-1, keepdims=True)
            yield part, z - m - np.log(np.exp(z - m).sum(-1, keepdims=True))

    def nll(self, ids, ctx):
        """Sum in nats."""
        return -sum(z[range(len(part)), part].sum() for part, z in self.log_probs(ids, ctx))

    def accepted(self, draft, ids, ctx):
        """How many of the draft's tokens are accepted, had each been drafted alone: at temperature 0, where its best
        is this model's, and, in the mean, at temperature 1."""
        both = np.zeros(2)
        for (_, p), (_, q) in zip(self.log_probs(ids, ctx), draft.log_probs(ids, ctx)):
            both += (p.argmax(-1) == q.argmax(-1)).sum(), np.exp(np.minimum(p, q)).sum()
        return both

    def swap(self, layer, a, b):
        for n in ("gate", "up", "down"):
            t = self.w[f"blk.{layer}.ffn_{n}_exps.weight"]
            t[[a, b]] = t[[b, a]]

    def complete(self, prompt, n):
        ids = [self.bos] + self.tok.encode(prompt)
        for _ in range(n):
            i = int(self.logits(ids)[-1].argmax())
            if i == self.bos:
                break
            ids.append(i)
        return self.tok.decode(ids)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("model")
    ap.add_argument("texts", nargs="*", help="held-out texts")
    ap.add_argument("--ctx", type=int, default=512)
    ap.add_argument("--swap", action="store_true", help="swap two experts, layer by layer")
    ap.add_argument("--draft", help="a draft model: how many of its tokens this one accepts")
    ap.add_argument("--magnitudes", action="store_true",
                    help="how a chosen expert's weight goes with the length of what it adds (HOBBIT, section 3.2)")
    ap.add_argument("-p", action="append", default=[], help="complete this prompt, greedily")
    ap.add_argument("-n", type=int, default=48)
    a = ap.parse_args()
    m = Gguf(a.model)
    draft = Gguf(a.draft) if a.draft else None
    for prompt in a.p:
        print("---\n" + m.complete(prompt, a.n))
    for path in a.texts:
        text = open(path, newline="").read()
        ids, nbytes, words = m.tok.encode(text), len(text.encode()), len(text.split())
        m.counts[:] = 0
        m.weighed = [[] for _ in range(m.layers)] if a.magnitudes else None
        total = m.nll(ids, a.ctx)
        weighed, m.weighed = m.weighed, None
        print(f"{path}: {len(ids)} tokens, {nbytes} bytes, {words} words; perplexity a token "
              f"{np.exp(total / len(ids)):.4f}, a word {np.exp(total / words):.2f}, "
              f"bits a byte {total / np.log(2) / nbytes:.4f}")
        if draft:
            print("  of the draft's tokens accepted: {:.1f} % at temperature 0, {:.1f} % at 1".format(
                *100 * m.accepted(draft, ids, a.ctx) / len(ids)))
        if not m.experts:
            continue
        share = m.counts / m.counts.sum(1, keepdims=True)
        for l, row in enumerate(share):
            print(f"  layer {l}: share in % " + " ".join(f"{100 * s:5.1f}" for s in row))
        if a.magnitudes:
            of_layers = [np.concatenate(pairs, -1).astype(np.float64) for pairs in weighed]
            by_layer = " ".join(f"{np.corrcoef(pairs)[0, 1]:.3f}" for pairs in of_layers)
            every = np.corrcoef(np.concatenate(of_layers, -1))[0, 1]
            print(f"  correlation of |G| with |G E|: {every:.3f}; by layer {by_layer}")
        if a.swap:
            for l in range(m.layers):
                b, c = map(int, np.argsort(-share[l])[:2])  # the two busiest
                m.swap(l, b, c)
                t = m.nll(ids, a.ctx)
                m.swap(l, b, c)
                print(f"  layer {l}, experts {b} and {c} swapped: {np.exp(t / len(ids)):.4f}")


if __name__ == "__main__":
    main()
