#!/usr/bin/env python3
"""Reads what run.sh left in the current folder; writes the figures as JSON to the file named and a Markdown table to
standard output. Figures of the table: misses per token of each policy divided by LRU's."""
import json
import sys

PERCENTS = ["25", "37.5", "50", "62.5", "75"]
ORDER = "lru lfu hobbit edgemoe smoe arc classlru learned".split()


def key(file):
    return file.rsplit("/", 1)[-1].removesuffix(".trace")


fitted = {}
for model in ("demo", "syn"):
    for percent in PERCENTS:
        weights = [float(weight) for weight in open(f"fit-{model}-{percent}.txt").read().split()[3].split(",")]
        for trace in json.load(open(f"fitted-{model}-{percent}.json")):
            row = next(r for r in trace["replays"] if r["policy"] == "hobbit")
            fitted[key(trace["file"]), percent + "%"] = (row, weights)

out, lines = [], []
for trace in json.load(open("replays.json")):
    name = key(trace["file"])
    rows, tokens = {}, trace["tokens"]
    for row in trace["replays"]:
        rows[row["policy"], row["budget"]] = row
    budgets = [p + "%" for p in PERCENTS]
    for budget in budgets:
        row, weights = fitted[name, budget]
        rows["hobbit, fitted", budget] = dict(row, weights=weights)
    figures = []
    for (policy, budget), row in rows.items():
        phases = [row["outcome"][phase] for phase in ("prefill", "decode")]
        hits = sum(phase["hits"] for phase in phases)
        penalty = sum(phase["penalty"] for phase in phases)
        n_misses = sum(sum(phase["misses"].values()) for phase in phases)
        lfu = sum(rows["lfu", budget]["outcome"][phase]["penalty"] for phase in ("prefill", "decode"))
        figures.append({
            "policy": policy, "budget": budget, "hit_rate": round(hits / (hits + n_misses), 5),
            "penalty_per_token": round(penalty / tokens, 5), "to_lru": round(row["penalty_to_lru"], 5),
            "to_lfu": round(penalty / lfu, 5), "to_belady": round(row["penalty_to_belady"], 5),
        } | ({"weights": row["weights"]} if "weights" in row else {}))
    out.append({"trace": name, "model": trace["model"], "tokens": tokens, "figures": figures})
    lines += ["", f"**{name}**, {tokens} tokens", "", "| policy | " + " | ".join(budgets) + " |", "|---|" + "---|" * len(budgets)]
    of = {(f["policy"], f["budget"]): f for f in figures}
    lines.append("| LRU, hit rate | " + " | ".join(f"{100 * of['lru', b]['hit_rate']:.1f} %" for b in budgets) + " |")
    lines.append("| learned, hit rate | " + " | ".join(f"{100 * of['learned', b]['hit_rate']:.1f} %" for b in budgets) + " |")
    for policy in ORDER[:5] + ["hobbit, fitted"] + ORDER[5:] + ["belady"]:
        lines.append(f"| {policy} | " + " | ".join(f"{of[policy, b]['to_lru']:.3f}" for b in budgets) + " |")
json.dump({"note": "decode one token at a time; penalty: misses, all of high precision; syn: synthetic routing (random weights)",
           "traces": out}, open(sys.argv[1], "w"), indent=1)
print("\n".join(lines).lstrip())
