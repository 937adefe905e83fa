"""Checks that the judge can say no: each promise is broken by a record that is made worse, and by none that is
better."""

from __future__ import annotations

import copy

import pandas as pd

from .claims import PROMISES, claims
from .records import figures

BASE = {"hobbit_engine": "hobbit", "hobbit_outcome": "ok", "model_filename": "dir/m.gguf", "model_size": 1 << 30, "n_prompt": 8,
        "n_gen": 20, "n_depth": 0, "hobbit_limit": 2 << 30, "hobbit_budget": 2 << 30, "hobbit_peak_rss": 1 << 30,
        "hobbit_decode_ts": 20.0, "hobbit_prompt_ts": 50.0, "hobbit_decode_median_ns": 50_000_000, "hobbit_whole_ns": 10**9,
        "hobbit_first_token_ns": 10**8, "hobbit_logits_compared": 5, "hobbit_logits_equal": 5,
        "hobbit_steps_ns": [10**7] * 20,
        "hobbit_series": [{"t_ns": at, "rss": 1 << 20, "heap": 1 << 19, "fds": 8, "tokens": at} for at in range(21)]}
STOCK = {"hobbit_engine": "llama.cpp", "hobbit_decode_ts": 19.9, "hobbit_prompt_ts": 49.0, "hobbit_whole_ns": 10**9,
         "hobbit_first_token_ns": 2 * 10**8}
# Changes of hobbit's records of a study, and the number of the promise that each breaks.
WORSE = [
    ("peers", {"hobbit_decode_ts": 19.8}, 0), ("peers", {"hobbit_decode_ts": None, "hobbit_outcome": "failed: x"}, 0),
    ("resident", {"hobbit_decode_median_ns": 51_500_000}, 1), ("resident", {"hobbit_decode_ts": 19.0}, 1),
    ("fits", {"hobbit_whole_ns": 1_030_000_000}, 2), ("fits", {"hobbit_whole_ns": None}, 2),
    ("contended", {"hobbit_prompt_ts": 47.0}, 3), ("contended", {"hobbit_decode_ts": 19.0}, 3),
    ("startup", {"hobbit_first_token_ns": 3 * 10**8}, 4),
    ("papers", {"hobbit_peak_rss": (2 << 30) + 1}, 5), ("papers", {"hobbit_outcome": "killed"}, 5),
    ("papers", {"hobbit_logits_equal": 4}, 6),
    ("long", {"hobbit_steps_ns": [10**7] * 10 + [11 * 10**6] * 10}, 7),
    ("long", {"hobbit_outcome": "failed: x", "hobbit_series": []}, 7),
]


def kept(records: list[dict]) -> list[str]:
    return [row["kept"] for row in claims(pd.DataFrame([{"file": "f", "raw": raw} | figures(raw) for raw in records]))]


def run() -> None:
    """Raises AssertionError where a verdict is wrong."""
    records = []
    for label in ("peers", "resident", "fits", "contended", "startup", "papers", "long"):
        for engine in ({}, STOCK):
            records.append(copy.deepcopy(BASE | engine) | {"hobbit_label": label, "hobbit_busy": int(label == "contended")})
    # More memory than the model, so that there is a budget to dip from.
    records += [one | {"hobbit_limit": 3 << 30} for one in records if one["hobbit_label"] == "fits"]
    assert kept(records) == ["yes"] * len(PROMISES), kept(records)
    changes = [*WORSE, *(("long", {"hobbit_series": [
        moment | ({part: moment[part] + more} if at == 20 else {}) for at, moment in enumerate(BASE["hobbit_series"])]}, 7)
        for part, more in (("rss", 1 << 15), ("heap", 1 << 15), ("fds", 1)))]
    for label, change, promise in changes:
        worse = [one | (change if one["hobbit_label"] == label and one["hobbit_engine"] == "hobbit" else {}) for one in records]
        found = kept(worse)
        assert found[promise] == "**no**", (PROMISES[promise][0], label, change, found)
    dips = [one | ({"hobbit_decode_ts": 18.0} if one["hobbit_limit"] == 3 << 30 else {}) for one in records]
    assert kept(dips)[2] == "**no**"
    assert kept([one for one in records if one["hobbit_label"] != "startup"])[4] == "**not measured**"
    dynamic = [one | {"hobbit_precision": "dynamic", "hobbit_logits_equal": 0} if one["hobbit_label"] == "papers" else one
               for one in records]
    assert kept(dynamic)[6] == "yes", "dynamic precision is meant to differ"
