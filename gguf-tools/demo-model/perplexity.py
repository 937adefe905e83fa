#!/usr/bin/env python3
"""Held-out perplexity of a checkpoint (F32) in torch, to compare with check.py
on the exported file and with llama.cpp."""
import argparse, math, os
import numpy as np
import torch
from model import Model, nll

ap = argparse.ArgumentParser()
ap.add_argument("--work", required=True)
ap.add_argument("--name", default="demo")
a = ap.parse_args()
torch.set_num_threads(1)
ck = torch.load(os.path.join(a.work, a.name + ".pt"), map_location="cpu")
model = Model(ck["config"])
model.load_state_dict(ck["model"])
for n in ("prose", "code"):
    ids = np.load(os.path.join(a.work, f"heldout-{n}.npy"))
    print(n, len(ids), "tokens, perplexity a token", round(math.exp(nll(model, ids)), 4))
