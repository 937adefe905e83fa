#!/usr/bin/env python3
"""Draws docs/images/speed-memory.svg, the picture of README.md, from the records of `prove.sh routes`.

usage: benches/picture.py [RECORDS] [OUT]      needs matplotlib
Both engines are on the same tokens in the same memory; with a limit, a bar is a run from a cold page cache.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benches/results/amd-epyc-2c-24gib-virtio/prove/routes.jsonl"
OUT = ROOT / "docs/images/speed-memory.svg"
MODELS = {"qwen3-30b.gguf": "Qwen3-30B-A3B's shape, Q4_K", "gptoss.gguf": "gpt-oss-120b's shape, 6 of 36 layers, MXFP4"}
ENGINES = {"hobbit": "#2f7d4f", "llama.cpp": "#9aa3ab"}


def speeds(path):
    """(model, engine, limit) -> decoded tokens a second and the file's bytes, first record of each case."""
    found = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["hobbit_variant"] not in ("", "no limit") or record["hobbit_outcome"] != "ok":
            continue
        key = (record["model_filename"], record["hobbit_engine"], record["hobbit_limit"])
        found.setdefault(key, (record["hobbit_decode_ts"], record["model_size"]))
    return found


def main(records=RECORDS, out=OUT):
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hobbit", "font.size": 10})
    found = speeds(Path(records))
    figure, panels = plt.subplots(1, len(MODELS), figsize=(9, 3.6), layout="constrained")
    for panel, (model, title) in zip(panels, MODELS.items()):
        limits = sorted({limit for name, _, limit in found if name == model and limit}) + [None]
        size = next(size for (name, _, _), (_, size) in found.items() if name == model)
        for i, (engine, colour) in enumerate(ENGINES.items()):
            height = [found[model, engine, limit][0] for limit in limits]
            places = [x + (i - 0.5) * 0.4 for x in range(len(limits))]
            bars = panel.bar(places, height, 0.38, color=colour, label=engine)
            panel.bar_label(bars, fmt="%.1f", padding=2, fontsize=9)
        names = [f"{limit / 2**30:g} GiB" if limit else "no limit" for limit in limits]
        panel.set_xticks(range(len(limits)), names)
        panel.set_title(f"{title}, {size / 2**30:.1f} GiB", fontsize=10)
        panel.set_xlabel("memory limit")
        panel.margins(y=0.12)
        panel.spines[["top", "right"]].set_visible(False)
    honest = "random weights on recorded routes, a 2-core VM; no real model and no GPU was measured"
    figure.supxlabel(honest, fontsize=8)
    panels[0].set_ylabel("decode, tokens a second")
    panels[0].legend(frameon=False, loc="upper left")
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:3])
