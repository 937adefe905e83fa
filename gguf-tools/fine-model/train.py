#!/usr/bin/env python3
"""Trains the fine-grained model, unattended: on one H100 in minutes, on a CPU for some steps as a test.

    python3 train.py --data WORK --out DIR --minutes 15

The learning rate follows the share of the training time (or of --steps) that is used up and is 0 at the end. Every
minute it writes state.pt (weights, optimizer, time used), from which --resume goes on, and every --parts-every
seconds weights.0, weights.1, ... (checkpoint.py), from which export.py makes the GGUF."""
import argparse, json, lzma, math, os, sys, time
import numpy as np
import torch
import torch.nn.functional as F
import checkpoint
from network import CONFIG, CONFIGS, Experts, Model, fastest_products, one_by_one
from model import windows  # the demo model's

KINDS = ("prose", "code", "docs", "dialogue")


class Text:
    """One kind's tokens on the device, and where its windows may begin."""

    def __init__(self, data, kind, newline, device):
        ids = np.frombuffer(lzma.open(os.path.join(data, f"tokens-{kind}.xz")).read(), "<u2")
        self.size = len(ids)
        self.ids = torch.from_numpy(ids.astype(np.int32)).to(device)
        self.docs = torch.from_numpy(np.flatnonzero(ids[:-1] == 0) + 1).to(device)
        self.lines = torch.from_numpy(np.flatnonzero(newline[ids] | (ids == 0)) + 1).to(device)

    def windows(self, n, length, g):
        """`n` windows of `length` tokens: one in ten begins with a document, four with a line, five anywhere."""
        dev = self.ids.device
        r = torch.rand(n, device=dev, generator=g)
        some = lambda count: torch.randint(count, (n,), device=dev, generator=g)
        start = torch.where(r < 0.1, self.docs[some(len(self.docs))],
                            torch.where(r < 0.5, self.lines[some(len(self.lines))], some(self.size)))
        start = start.clamp_(max=self.size - length)
        return self.ids[start[:, None] + torch.arange(length, device=dev)].long()


@torch.no_grad()
def held_out(model, ids, autocast, limit=None):
    """Mean negative log-likelihood a token over the text, in nats, each token predicted once, and the counts of
    the experts per layer."""
    model.eval()
    total = n = 0
    counts = 0
    for w in windows(ids, model.c["ctx"])[:limit]:
        w = w.to(model.embd.device)
        with autocast():
            logits = model(w)[0]
        total += F.cross_entropy(logits[0, :-1].float(), w[0, 1:], reduction="sum").item()
        n += w.shape[1] - 1
        counts = counts + torch.stack([b.experts.counts for b in model.blocks])
    model.train()
    return total / n, counts


def entropy(counts):
    """Entropy of the use of the experts as a share of its maximum, layer by layer; and the least used one's share
    of an equal part. A dense model has neither."""
    if not counts.numel():
        return [], None
    p = counts.double() / counts.sum(1, keepdim=True)
    h = -(p * p.clamp_min(1e-12).log()).sum(1) / math.log(p.shape[1])
    return [round(x, 3) for x in h.tolist()], round(float(p.min()) * p.shape[1], 3)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True, help="folder that prepare.py wrote")
    ap.add_argument("--model", choices=CONFIGS, default="fine")
    ap.add_argument("--teacher", help="fine.gguf: learn what it expects next instead of what comes next")
    ap.add_argument("--out", required=True, help="folder for state.pt and train.log")
    ap.add_argument("--parts", help="folder for the weights in parts (default: --out)")
    ap.add_argument("--parts-every", type=float, default=150, help="seconds")
    ap.add_argument("--state-every", type=float, default=60, help="seconds")
    ap.add_argument("--minutes", type=float, default=15, help="training time of the whole schedule, over all resumes")
    ap.add_argument("--stop-at", type=float, help="Unix time at which to save and stop even if unfinished")
    ap.add_argument("--steps", type=int, help="maximum steps: the schedule ends there")
    ap.add_argument("--resume", action="store_true", help="go on from --out/state.pt if it is there")
    ap.add_argument("--batch", type=int, default=64, help="windows a step")
    ap.add_argument("--len", type=int, default=CONFIG["ctx"], help="tokens a window")
    ap.add_argument("--lr", type=float, default=2.5e-3)
    ap.add_argument("--warmup", type=int, default=300, help="steps")
    ap.add_argument("--decay", type=float, default=0.1, help="weight decay")
    ap.add_argument("--drop", type=float, default=0.1)
    ap.add_argument("--balance", type=float, default=0.02)
    ap.add_argument("--z", type=float, default=0.001)
    ap.add_argument("--mix", type=float, default=0.7, help="a kind's share of the windows is its size to this power")
    ap.add_argument("--own", type=float, help="share of the windows that are what fine.gguf wrote (own.py)")
    ap.add_argument("--eval-every", type=int, default=500, help="steps")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--threads", type=int)
    ap.add_argument("--f32", action="store_true", help="products in F32, faster on a CPU that is slow in bf16")
    a = ap.parse_args()
    config = CONFIGS[a.model]
    if a.threads:
        torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    autocast = lambda: torch.autocast(dev, torch.bfloat16, enabled=not a.f32)
    os.makedirs(a.out, exist_ok=True)
    log = open(os.path.join(a.out, "train.log"), "a")

    def say(line):
        print(line, flush=True)
        print(line, file=log, flush=True)

    say(f"python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        + (f"{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory >> 20} MiB"
           if dev == "cuda" else f"CPU, {torch.get_num_threads()} threads"))
    Experts.products = staticmethod(fastest_products(dev) if dev == "cuda" else one_by_one)
    say(f"expert products: {'F32' if a.f32 else Experts.products.__name__}; {json.dumps(vars(a))}")

    t = time.time()
    newline = np.array(json.load(open(os.path.join(a.data, "ends-line.json"))))
    assert len(newline) == config["vocab"], (len(newline), config["vocab"])
    text = [Text(a.data, k, newline, dev) for k in KINDS]
    held = [np.frombuffer(lzma.open(os.path.join(a.data, f"heldout-{k}.xz")).read(), "<u2") for k in KINDS]
    share = np.array([x.size for x in text], float) ** a.mix
    share /= share.sum()
    if a.own:
        text.append(Text(a.data, "own", newline, dev))
        share = np.append(share * (1 - a.own), a.own)
    say("tokens: " + ", ".join(f"{k} {x.size} ({100 * s:.1f} % of the windows)"
                               for k, x, s in zip(KINDS + ("own",), text, share))
        + f"; read in {time.time() - t:.1f} s")

    model = Model(config).to(dev)
    teacher = Model(CONFIG).to(dev).eval().requires_grad_(False) if a.teacher else None
    if teacher:
        teacher.load_state_dict({k: torch.from_numpy(v) for k, v in checkpoint.of_gguf(a.teacher).items()})
        if model.embd.shape == teacher.embd.shape:  # where to begin; a state to go on from has its own
            model.load_state_dict(dict(embd=teacher.embd, norm=teacher.norm), strict=False)
    before = dict(step=0, tokens=0, seconds=0.0)
    routers = [p for name, p in model.named_parameters() if name.endswith("gate_inp")]
    matrices = [p for p in model.parameters() if p.ndim >= 2 and not any(p is r for r in routers)]
    rest = [p for p in model.parameters() if p.ndim < 2] + routers
    opt = torch.optim.AdamW([dict(params=matrices, weight_decay=a.decay), dict(params=rest, weight_decay=0.0)],
                            lr=a.lr, betas=(0.9, 0.95), eps=1e-9, fused=True)
    state = os.path.join(a.out, "state.pt")
    if a.resume and os.path.exists(state):
        saved = torch.load(state, map_location=dev, weights_only=True)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        before = saved["before"]
    say(f"{sum(p.numel() for p in model.parameters())} parameters; after {before}")
    # another seed after every resume, or the same windows would come again
    g = torch.Generator(dev).manual_seed(a.seed * 1000003 + before["step"])
    pick = np.random.default_rng([a.seed, before["step"]])

    def now():
        return dict(step=before["step"] + step, tokens=before["tokens"] + step * a.batch * a.len,
                    seconds=before["seconds"] + time.time() - t0)

    def save_state():
        torch.save(dict(model=model.state_dict(), opt=opt.state_dict(), before=now()), state + ".new")
        os.replace(state + ".new", state)

    def save_parts():
        if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
            say("weights that are not finite: the parts are left as they were")
            return
        sd = {k: v.float().cpu().numpy() for k, v in model.state_dict().items()}
        sd = {k: v if v.ndim < 2 or k.endswith("gate_inp") else v.astype(np.float16) for k, v in sd.items()}
        checkpoint.save(a.parts or a.out, sd, dict(now(), config=config, args=vars(a), held=last_held, losses=losses),
                        os.path.join(os.path.dirname(os.path.abspath(a.parts or a.out)), "fine-parts.new"))

    t0 = time.time()
    states, parts, last = t0, t0, t0
    step, since, seen, sums, uses = 0, 0, 0, torch.zeros(3, device=dev), 0
    last_held, losses = {}, []
    first = a.batch * a.len * 20  # an early line about the speed
    while True:
        t = now()
        used = max(t["seconds"] / (a.minutes * 60), t["step"] / a.steps if a.steps else 0)
        cut = a.stop_at and time.time() >= a.stop_at
        done = used >= 1 or cut
        if since and (seen == first or step % 100 == 0 or done):
            if dev == "cuda":
                torch.cuda.synchronize()
            sec, mean = time.time() - last, (sums / since).tolist()
            row = dict(step=t["step"], used=round(used, 4), s=round(t["seconds"], 1), tokens=t["tokens"],
                       tok_s=round(since * a.batch * a.len / max(sec, 1e-9)), lr=round(opt.param_groups[0]["lr"], 6),
                       loss=round(mean[0], 4), balance=round(mean[1], 4), z=round(mean[2], 3))
            row["entropy"], row["least"] = entropy(uses)
            if not math.isfinite(mean[0]):
                say(json.dumps(row))
                say("the loss is not finite: stopping; the last state and parts are from before")
                sys.exit(3)
            sums.zero_()
            since, uses, last = 0, 0, time.time()
            if step % a.eval_every == 0 or done:
                row["held"] = {}
                for k, ids in zip(KINDS, held):
                    loss, counts = held_out(model, ids, autocast, None if done or dev == "cuda" else 1)
                    row["held"][k] = round(loss, 4)
                    if done:
                        say(f"held-out {k}: {loss:.4f} nats a token; entropy and least share {entropy(counts)}")
                last_held = row["held"]
                losses.append([t["step"], row["loss"], *last_held.values()])
                last = time.time()
            say(json.dumps(row))
        if done or time.time() - states > a.state_every:
            save_state()
            states = time.time()
        if done or time.time() - parts > a.parts_every or (step == 50 and dev == "cuda"):
            save_parts()
            parts = time.time()
        if done:
            break
        lr = a.lr * min(1.0, (t["step"] + 1) / a.warmup) * max(0.0, 1 - used)
        for group in opt.param_groups:
            group["lr"] = lr
        n = pick.multinomial(a.batch, share)
        ids = torch.cat([x.windows(int(k), a.len, g) for x, k in zip(text, n) if k])
        given = F.pad(ids[:, :-1], (1, 0))  # the start token first
        with autocast():
            logits, balance, z = model(given, a.drop)
            expected = teacher(given)[0].float().softmax(-1).flatten(0, 1) if teacher else ids.flatten()
        loss = F.cross_entropy(logits.float().flatten(0, 1), expected)
        opt.zero_grad(set_to_none=True)
        (loss + a.balance * balance + a.z * z).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sums += torch.stack((loss.detach(), balance.detach(), z.detach()))
        uses = uses + torch.stack([b.experts.counts for b in model.blocks])
        step, since, seen = step + 1, since + 1, seen + a.batch * a.len
    say(f"{'stopped early' if used < 1 else 'finished'}: {json.dumps(now())}")


if __name__ == "__main__":
    main()
