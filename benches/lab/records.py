"""Records of hobbit-bench and study.py: reading them, figures of each, and the cases of a study."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

HOBBIT, BASELINE = "hobbit", "llama.cpp"
NAN = float("nan")


def read(directories: list[Path]) -> pd.DataFrame:
    """One row per record of the *.json and *.jsonl files, in order: its figures, its raw object and its file."""
    rows = []
    for directory in directories:
        for path in sorted(p for p in directory.iterdir() if p.suffix in (".json", ".jsonl")):
            for raw in objects(path):
                rows.append({"file": path.name, "raw": raw} | figures(raw))
    if not rows:
        sys.exit(f"no records in {', '.join(map(str, directories))}: expected what hobbit-bench -o jsonl writes")
    data = pd.DataFrame(rows)
    if data.machine.nunique() > 1:
        data["model"] += " on " + data.machine
    return data


def objects(path: Path) -> list[dict]:
    """The records of a file: a JSON array, or one object a line. A last line that a crash cut off is left out."""
    text = path.read_text()
    try:
        found = json.loads(text)
        found = found if isinstance(found, list) else [found]
    except json.JSONDecodeError:
        lines = [line for line in text.splitlines(keepends=True) if line.strip()]
        if not lines[-1].endswith("\n"):
            print(f"note: {path}: the last record is cut off and left out", file=sys.stderr)
            lines.pop()
        found = [json.loads(line) for line in lines]
    return [one for one in found if isinstance(one, dict) and one.get("hobbit_engine")]


def figures(raw: dict) -> dict:
    """Every figure of a record; NaN where it is not known."""

    def get(name: str) -> float:
        value = raw.get(name if name in ("avg_ts", "model_size") else "hobbit_" + name)
        return NAN if value is None else float(value)

    def positive(value: float) -> float:
        return value if value > 0 and np.isfinite(value) else NAN

    def over(value: float, by: float) -> float:
        return value / by if by > 0 else NAN

    prompt, gen, depth = (int(raw.get(name) or 0) for name in ("n_prompt", "n_gen", "n_depth"))
    alone = get("avg_ts")
    decode_ts = positive(get("decode_ts") if get("decode_ts") >= 0 else alone if gen and not prompt else NAN)
    prompt_ts = positive(get("prompt_ts") if get("prompt_ts") >= 0 else alone if prompt and not gen else NAN)
    decode_ns, steps = raw.get("hobbit_decode_ns") or [], raw.get("hobbit_steps_ns") or []
    later = decode_ns[1:] or decode_ns
    later_steps = sorted(steps[len(steps) // max(len(decode_ns), 1):] or steps)
    # Single tokens where they were counted apart, all tokens elsewhere.
    apart = "decode_" if get("decode_bytes") >= 0 and gen and sum(decode_ns) else ""
    all_ns = decode_ns if apart else raw.get("samples_ns") or []
    tokens = (gen if apart else prompt + gen) * len(all_ns)
    hits, misses = get(apart + "hits"), get(apart + "misses")
    stall_ms, token_ms = over(get(apart + "stall_ns") / 1e6, tokens), positive(over(sum(all_ns) / 1e6, tokens))
    share = over(get("expert_cache"), get("expert_bytes"))
    share = share if share >= 0 else over(get("n_slots"), get("n_experts"))
    file = (raw.get("model_filename") or "").replace("\\", "/").split("/")[-1].removesuffix(".gguf")

    def tenth_ts(twentieths: int) -> float:
        part = steps[len(steps) * twentieths // 20:len(steps) * (twentieths + 2) // 20]
        return positive(over(len(part) * 1e9, sum(part)))

    return {
        "label": raw.get("hobbit_label") or "", "engine": raw["hobbit_engine"], "variant": raw.get("hobbit_variant") or "",
        "flags": raw.get("hobbit_flags") or "", "machine": raw.get("hobbit_machine") or "",
        "outcome": raw.get("hobbit_outcome") or "failed", "model": file or raw.get("model_type") or "",
        # 0 stands for no limit.
        "limit": int(raw.get("hobbit_limit") or 0), "disk": int(raw.get("hobbit_disk_limit") or 0),
        "busy": int(raw.get("hobbit_busy") or 0), "n_prompt": prompt, "n_gen": gen, "n_depth": depth,
        "threads": int(raw.get("n_threads") or 0),
        "decode_ts": decode_ts, "prompt_ts": prompt_ts, "prefill_s": positive(over(prompt, prompt_ts)),
        "median_ms": positive(get("decode_median_ns") / 1e6), "mean_ms": over(1e3, decode_ts),
        "whole_s": positive(get("whole_ns") / 1e9), "commands_per_s": over(1e9, get("whole_ns")),
        "load_s": positive(get("load_ns") / 1e9), "first_token_s": positive(get("first_token_ns") / 1e9),
        "of_model": positive(over(get("limit"), get("model_size"))),
        "peak_rss": positive(get("peak_rss")), "cgroup_peak": positive(get("cgroup_peak")), "budget": get("budget"),
        "in_memory": min(share, 1.0) if share >= 0 else NAN,
        "hit_rate": over(hits, hits + misses), "hits": over(hits, tokens), "misses": over(misses, tokens),
        "bytes_per_token": over(get(apart + "bytes"), tokens),
        "stall_ms": stall_ms, "token_ms": token_ms, "stall_share": over(stall_ms, token_ms),
        "roofline_ts": positive(get("roofline_ts")), "roofline_share": positive(get("roofline_share")),
        "efficiency": positive(get("efficiency")),
        "later_ts": positive(over(gen * len(later) * 1e9, sum(later))),
        "p99_ms": later_steps[len(later_steps) * 99 // 100] / 1e6 if later_steps else NAN,
        "first_tenth": tenth_ts(0), "middle_tenth": tenth_ts(9), "last_tenth": tenth_ts(18),
        "compared": get("logits_compared"), "equal": get("logits_equal"), "n_expert": get("n_expert"),
    }


def warm_and_end(raw: dict) -> tuple[dict, dict] | None:
    """The process when a tenth of the tokens was evaluated, and when all were."""
    series = raw.get("hobbit_series") or []
    last = max((moment["tokens"] for moment in series), default=0)
    at = lambda tokens: next(moment for moment in series if moment["tokens"] >= tokens)
    return (at(-(-last // 10)), at(last)) if last else None


@dataclass(frozen=True)
class Place:
    """What two engines must share to be compared."""

    model: str
    limit: int
    disk: int
    busy: int
    n_prompt: int
    n_gen: int
    n_depth: int

    def test(self, with_depth: bool = True) -> str:
        """As llama-bench writes it: pp16+tg32 @ d64."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt or not self.n_gen else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth and with_depth else "")

    def room(self) -> str:
        return f"{self.model} in {size(self.limit)}" if self.limit else f"{self.model} without a limit"

    def __str__(self) -> str:
        return f"{self.room()}, {self.test()}" + (f", beside {self.busy}" if self.busy else "")


@dataclass(frozen=True, eq=False)
class Case:
    """One engine with one variant and set of flags in one place, with its repeated runs."""

    place: Place
    engine: str
    variant: str
    flags: str
    runs: pd.DataFrame

    @cached_property
    def ok(self) -> pd.DataFrame:
        return self.runs[self.runs.outcome == "ok"]

    def median(self, figure: str) -> float:
        return self.ok[figure].median()

    def shown(self, figure: str) -> str:
        """The median, with least and most where there are several runs; how it ended where there is none."""
        values = self.ok[figure].dropna()
        if len(values) == 0:
            return "-" if self.outcome() == "ok" else self.outcome()
        median = digits(values.median())
        return median if len(values) == 1 else f"{median} ({digits(values.min())}..{digits(values.max())})"

    def first(self, figure: str) -> float:
        """Of the first run that has it, however it ended."""
        values = self.runs[figure].dropna()
        return values.iloc[0] if len(values) else NAN

    def outcome(self) -> str:
        bad = self.runs.outcome[self.runs.outcome != "ok"]
        if len(bad) == 0:
            return "ok"
        return bad.iloc[0] if len(self.runs) == 1 else f"{len(bad)} of {len(self.runs)}: {bad.iloc[0]}"

    def name(self) -> str:
        return f"{self.engine}, {self.variant}" if self.variant else self.engine

    def logits(self) -> str:
        compared = self.runs.compared.sum()
        return f"{self.runs.equal.sum():.0f} of {compared:.0f}" if compared else "-"


class Study:
    """The cases with some labels, in the order of their first records."""

    def __init__(self, data: pd.DataFrame, *labels: str):
        rows = data[data.label.isin(labels)].copy()
        prompts = rows[(rows.n_prompt > 0) & (rows.n_gen == 0)]
        gens = rows[(rows.n_gen > 0) & (rows.n_prompt == 0)]
        # Prompts and single tokens that were measured apart make one row where the study has one length of each.
        if prompts.n_prompt.nunique() == 1 and gens.n_gen.nunique() == 1:
            rows.loc[prompts.index.union(gens.index), ["n_prompt", "n_gen"]] = (
                prompts.n_prompt.iloc[0], gens.n_gen.iloc[0])
        self.rows = rows
        keys = ["model", "limit", "disk", "busy", "n_prompt", "n_gen", "n_depth", "engine", "variant", "flags"]
        grouped = rows.groupby(keys, sort=False) if len(rows) else []
        self.cases = [Case(Place(key[0], *map(int, key[1:7])), *key[7:], runs) for key, runs in grouped]

    def hobbit(self) -> list[Case]:
        return [case for case in self.cases if case.engine == HOBBIT]

    def baseline(self, own: Case) -> Case | None:
        """llama.cpp's case in the same place, of the same variant if there are several."""
        there = [case for case in self.cases if case.engine == BASELINE and case.place == own.place]
        return next((case for case in there if case.variant == own.variant), there[0] if there else None)

    def by_place(self) -> dict[Place, list[Case]]:
        return grouped(self.cases, lambda case: replace(case.place, busy=0))

    def hobbit_by(self, figure: str) -> list[list[Case]]:
        """hobbit's cases of one model, variant and test, each group in the order of a figure."""
        place = lambda c: (c.place.model, c.variant, c.place.n_prompt, c.place.n_gen, c.place.n_depth)
        last = float("inf")
        key = lambda c: c.place.limit or last if figure == "limit" else np.nan_to_num(c.median(figure), nan=last)
        return [sorted(cases, key=key) for cases in grouped(self.hobbit(), place).values()]

    def threads(self) -> str:
        """On how many threads both engines computed, and how llama.cpp's were chosen."""
        words = []
        for engine in (HOBBIT, BASELINE):
            runs = self.rows[(self.rows.engine == engine) & (self.rows.threads > 0)]
            if len(runs):
                tried = engine == BASELINE and all(raw.get("hobbit_threads_tried") for raw in runs.raw)
                how = ", the fastest number in a short run of each case" if tried else ""
                words.append(f"{engine} on {' or '.join(map(str, sorted(set(runs.threads))))} threads{how}")
        return f"Threads: {'; '.join(words)}." if words else ""


def grouped(items, key) -> dict:
    groups: dict = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def ratio(own: Case | None, by: Case | None, figure: str) -> float:
    return own.median(figure) / by.median(figure) if own and by else NAN


def digits(value: float) -> str:
    """Three significant digits."""
    if not np.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    rounded = f"{value:.2e}"
    return f"{float(rounded):.{min(max(2 - int(rounded.split('e')[1]), 0), 12)}f}"


def times(value: float) -> str:
    return f"{digits(value)}x" if np.isfinite(value) else "-"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if np.isfinite(share) else "-"


def change(share: float) -> str:
    return f"{100 * share:+.2f} %".replace("-0.00", "+0.00") if np.isfinite(share) else "-"


def size(value: float) -> str:
    if not np.isfinite(value):
        return "-"
    units = iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while abs(value) >= 999.5:
        value, unit = value / 1024, next(units)
    return f"{digits(value)} {unit}"


def of_size(value: float, whole: float) -> str:
    """1.69 of 1.80 GiB (94.0 %)."""
    if not (np.isfinite(value) and whole > 0):
        return size(value)
    found, limit = size(value), size(whole)
    found = found.split()[0] if found.split()[1] == limit.split()[1] else found
    return f"{found} of {limit} ({percent(value / whole)})"
