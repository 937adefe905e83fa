#!/usr/bin/env python3
"""Trains the demo model. The learning rate follows the share of the time (or of
the steps) that is used up, and is 0 at the end."""
import argparse, json, os, time
import numpy as np
import torch
import torch.nn.functional as F
from model import CONFIG, Model, nll


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--work", required=True, help="folder that prepare.py wrote")
    ap.add_argument("--minutes", type=float, default=70)
    ap.add_argument("--steps", type=int, help="this many steps instead: reproducible")
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--batch", type=int, default=8, help="windows a step")
    ap.add_argument("--len", type=int, default=256, help="window length in tokens, doubled for the last 30 %%")
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--drop", type=float, default=0.05)
    ap.add_argument("--prose", type=float, default=0.65, help="share of prose windows")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--warmup", type=int, default=150, help="steps")
    ap.add_argument("--init", help="go on from this checkpoint's weights (a name)")
    ap.add_argument("--name", default="demo")
    a = ap.parse_args()
    torch.manual_seed(a.seed)
    torch.set_num_threads(a.threads)
    torch.set_flush_denormal(True)
    rng = np.random.default_rng(a.seed)
    dev = "cuda" if torch.cuda.is_available() else "cpu"

    load = lambda n: np.load(os.path.join(a.work, n + ".npy"))
    text = [load("prose").astype(np.int64), load("code").astype(np.int64)]
    held = {n: load("heldout-" + n) for n in ("prose", "code")}
    newline = load("newline")
    # windows begin at a document's start, at a line's, or anywhere
    docs = [np.flatnonzero(t[:-1] == 0) + 1 for t in text]
    lines = [np.flatnonzero(newline[t] | (t == 0)) + 1 for t in text]

    def batch(k):
        """As many tokens as ever, in windows k times as long, and what follows each."""
        n = a.len * k
        out = np.zeros((a.batch // k, n + 1), np.int64)  # column 0: the start token
        for row in out:
            d = int(rng.random() >= a.prose)
            t, last = text[d], len(text[d]) - n
            r = rng.random()
            i = (rng.choice(docs[d]) if r < 0.1 else rng.choice(lines[d]) if r < 0.5
                 else rng.integers(last))
            row[1:] = t[min(i, last):][:n]
        out = torch.from_numpy(out).to(dev)
        return out[:, :-1], out[:, 1:].reshape(-1)

    model = Model(CONFIG).to(dev)
    before = dict(step=0, tokens=0, seconds=0.0)
    if a.init:
        before = torch.load(os.path.join(a.work, a.init + ".pt"), map_location=dev)
        model.load_state_dict(before["model"])
        before = {k: before[k] for k in ("step", "tokens", "seconds")}
        print("going on after", before)
    n_par = sum(p.numel() for p in model.parameters())
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1},
                             {"params": rest, "weight_decay": 0.0}],
                            lr=a.lr, betas=(0.9, 0.95), eps=1e-9)
    print(f"{n_par} parameters, {dev}, {vars(a)}", flush=True)

    log = open(os.path.join(a.work, a.name + ".log"), "w")
    t0 = saved = time.time()
    step, sums, done = 0, np.zeros(3), False

    def save():
        path = os.path.join(a.work, a.name + ".pt")
        torch.save({"model": model.state_dict(), "config": CONFIG, "step": before["step"] + step,
                    "tokens": before["tokens"] + step * a.batch * a.len,
                    "seconds": before["seconds"] + time.time() - t0,
                    "args": vars(a)}, path + ".tmp")
        os.replace(path + ".tmp", path)

    while not done:
        used = (step / a.steps) if a.steps else (time.time() - t0) / (a.minutes * 60)
        done = used >= 1
        if step % 25 == 0 or done:
            k = 25 if step else 1
            row = dict(step=step, used=round(used, 4), s=round(time.time() - t0, 1),
                       loss=round(sums[0] / k, 4), balance=round(sums[1] / k, 4),
                       z=round(sums[2] / k, 4))
            sums[:] = 0
            if step % 500 == 0 or done:
                for n, ids in held.items():
                    row["held_" + n] = round(nll(model, ids, limit=None if done else 8), 4)
            print(json.dumps(row), file=log, flush=True)
            print(json.dumps(row), flush=True)
        if time.time() - saved > 180 or done:
            save()
            saved = time.time()
        if done:
            break
        lr = a.lr * min(1.0, (step + 1) / a.warmup) * max(0.0, 1 - used)
        for g in opt.param_groups:
            g["lr"] = lr
        ids, target = batch(1 if used < 0.7 else 2)
        logits, balance, z = model(ids, a.drop)
        loss = F.cross_entropy(logits.view(-1, CONFIG["vocab"]), target)
        opt.zero_grad(set_to_none=True)
        (loss + 0.01 * balance + 0.001 * z).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sums += (loss.item(), float(balance), float(z))
        step += 1


if __name__ == "__main__":
    main()
