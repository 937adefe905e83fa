#!/usr/bin/env python3
"""What fine.gguf itself writes, as a text for train.py --own: it goes on from beginnings in the training texts, one in
two greedily. Needs a server:

    hobbit-server -m ../../models/fine.gguf -c 4096 -np 8 -t 1 --port 8080
    python3 own.py --work WORK --minutes 10"""
import argparse, json, lzma, os, time, urllib.request
import numpy as np

CTX = 512


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--work", required=True, help="folder that prepare.py wrote; tokens-own.xz is added")
    ap.add_argument("--minutes", type=float, default=10)
    ap.add_argument("--url", default="http://127.0.0.1:8080")
    ap.add_argument("--seed", type=int, default=1)
    a = ap.parse_args()
    kinds = [np.frombuffer(lzma.open(os.path.join(a.work, f"tokens-{k}.xz")).read(), "<u2")
             for k in ("prose", "code", "docs", "dialogue")]
    pick, out, end = np.random.default_rng(a.seed), [], time.time() + 60 * a.minutes
    while time.time() < end:
        text, length = kinds[pick.integers(len(kinds))], pick.integers(16, 129)
        at = pick.integers(len(text) - length)
        prompt = [0] + text[at:at + length].tolist()
        ask = dict(prompt=prompt, n_predict=CTX - len(prompt), return_tokens=True, ignore_eos=True,
                   seed=int(pick.integers(1 << 31)), temperature=float(pick.integers(2)), top_k=0, top_p=1.0, min_p=0.0)
        request = urllib.request.Request(a.url + "/completion", json.dumps(ask).encode(),
                                         {"Content-Type": "application/json"})
        out += prompt + json.load(urllib.request.urlopen(request))["tokens"]
    with lzma.open(os.path.join(a.work, "tokens-own.xz"), "wb") as f:
        f.write(np.array(out + [0], "<u2").tobytes())
    print(f"{len(out)} tokens")


if __name__ == "__main__":
    main()
