#!/usr/bin/env python3
"""Tables of policies, slots, thresholds and predictions on recorded routes, as Markdown on standard output.

usage: routes.py HOBBIT_SIM TRACE [TRACE ...]
TRACEs come from 'hobbit-sim import'.
"""
import json
import subprocess
import sys

BUDGETS = ["12%", "25%", "50%", "75%"]
# A machine of two cores on which such experts take 182 ms a token: time by bytes, and an NVMe drive of 1.8 GiB/s.
SECONDS_PER_BYTE = 0.63e-3 / 3.06e6
LAYER_MS = 0.17
LINK = ["--link", "1.8GiB", "--latency-us", "100"]

sim, *traces = sys.argv[1:]


def replay(trace, *options, policy="learned", budgets=BUDGETS):
    command = [sim, "replay", trace, "--policy", policy, "--budget", ",".join(budgets), "--json", *options]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)[0]


def header(trace):
    command = [sim, "show", "--header", trace]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def total(row, *keys):
    phases = [row["outcome"][phase] for phase in ("prefill", "decode")]
    if keys == ("misses",):
        return sum(sum(phase["misses"].values()) for phase in phases)
    return sum(phase[keys[0]] for phase in phases)


def rows(answer, policy="learned"):
    """By budget and predictor."""
    return {(row["budget"], row["predictor"]): row for row in answer["replays"] if row["policy"] == policy}


def table(first, columns, lines):
    print("| " + " | ".join([first, *columns]) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for line in lines:
        print("| " + " | ".join(line) + " |")
    print()


def misses(trace, *options, policy="learned"):
    answer = rows(replay(trace, *options, policy=policy), policy)
    return [total(answer[budget, "none"], "misses") for budget in BUDGETS]


def model_of(trace):
    return (header(trace).get("header") or header(trace))["model"]


def slots(trace):
    even = misses(trace)
    lines = [["even, misses", *map(str, even)]]
    for name, options in [
        ("shallow-first:4", ["--slots", "shallow-first:4"]),
        ("one pool over all layers", ["--slots", "global"]),
    ]:
        lines.append([name, *(f"{own / base:.3f}" for own, base in zip(misses(trace, *options), even))])
    for name, options in [("the optimum, even", []), ("the optimum, one pool", ["--slots", "global"])]:
        optimum = misses(trace, *options, policy="belady")
        lines.append([name, *(f"{own / base:.3f}" for own, base in zip(optimum, even))])
    table("slots, misses of learned to even slots", BUDGETS, lines)


def time_of(trace):
    largest = max(layer["bytes_high"] for layer in model_of(trace)["layers"])
    return [*LINK, "--layer-ms", str(LAYER_MS), "--expert-ms", f"{largest * SECONDS_PER_BYTE * 1e3:.3f}"]


def recalls(trace):
    predictors = ["none", *(f"oracle:{percent}%" for percent in (60, 70, 80, 90, 97)), "oracle"]
    answer = rows(replay(trace, *time_of(trace), "--predictor", ",".join(predictors)))
    lines = []
    for predictor in predictors:
        cells = []
        for budget in BUDGETS:
            outcome = answer[budget, predictor]["outcome"]
            decode, prefetch = outcome["decode"], outcome["prefetch"]
            tokens = decode["tokens"]
            n_misses = sum(decode["misses"].values())
            rate = decode["hits"] / (decode["hits"] + n_misses)
            wait = 1e3 * decode["stall_seconds"] / tokens
            useful = f", {100 * prefetch['useful'] / prefetch['issued']:.0f} %" if prefetch["issued"] else ""
            read = outcome["bytes_read"] / sum(outcome[phase]["tokens"] for phase in ("prefill", "decode")) / 2**20
            cells.append(f"{100 * rate:.1f} % · {read:.0f} MiB · {wait:.0f} ms · {tokens / decode['seconds']:.2f} t/s{useful}")
        lines.append([predictor.replace("oracle:", "").replace("oracle", "100%"), *cells])
    table("recall", BUDGETS, lines)


def thresholds(trace):
    lines = []
    for t1, t2 in [(None, None), (0.9, 1.0), (0.8, 0.95), (0.6, 0.9), (0.4, 0.8)]:
        options = ["--low-bytes", "50%"]
        if t1 is not None:
            options += ["--t1", str(t1), "--t2", str(t2), "--upgrade", "off"]
        answer = rows(replay(trace, *time_of(trace), *options))
        cells = []
        for budget in BUDGETS:
            outcome = answer[budget, "none"]["outcome"]
            decode = outcome["decode"]
            read = outcome["bytes_read"] / sum(outcome[phase]["tokens"] for phase in ("prefill", "decode")) / 2**20
            skipped = decode["misses"]["skipped"] / (decode["hits"] + sum(decode["misses"].values()))
            low = decode["misses"]["low"] / (decode["hits"] + sum(decode["misses"].values()))
            speed = decode["tokens"] / decode["seconds"]
            cells.append(f"{read:.0f} MiB · {100 * low:.1f} % · {100 * skipped:.1f} % · {speed:.2f} t/s")
        lines.append(["exact" if t1 is None else f"{t1} / {t2}", *cells])
    table("T1 / T2", BUDGETS, lines)


print("Made by `benches/policies/routes.py`, from recorded routes; see [policies](../policies.md#real-models-routes).\n")
for trace in traces:
    print(f"## {model_of(trace)['name']}\n")
    answer = replay(trace, policy="all")
    names = list(dict.fromkeys(row["policy"] for row in answer["replays"]))
    of = {(row["policy"], row["budget"]): row["penalty_to_lru"] for row in answer["replays"]}
    print("Policies, slots divided evenly: misses to LRU's.\n")
    table("policy", BUDGETS, [[name, *(f"{of[name, budget]:.3f}" for budget in BUDGETS)] for name in names])
    print("How slots are divided: misses, and to those of even slots.\n")
    slots(trace)
    print("What knowing the next tokens' routes would bring: learned that evicts nobody whom they need.\n")
    print("Predictions taken from the recording: hit rate in decode, bytes read a token (prompt included), waits a token, "
          "simulated speed, used part of what was read ahead.\n")
    recalls(trace)
    print("Thresholds, low versions of half the bytes: bytes read a token, of decode's uses missed in low precision and "
          "left out, simulated speed.\n")
    thresholds(trace)
