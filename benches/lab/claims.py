"""hobbit's promises and whether the records keep them. The worst record that counts decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from .records import HOBBIT, Case, Study, change, digits, percent, ratio, size, times, warm_and_end

LONG = ("long", "pressure")


@dataclass
class Finding:
    words: str
    kept: bool


def worst(places: list[tuple[float, str]], failures: list[str], holds: Callable[[float], bool]) -> Finding | None:
    """Of places with how bad each is, the worst; failures break the promise. None without either."""
    if not places and not failures:
        return None
    bad = max(places, key=lambda place: place[0], default=None)
    return Finding("; ".join(([bad[1]] if bad else []) + failures), not failures and (bad is None or holds(bad[0])))


def against(cases: list[Case], study: Study, figure: str, show: Callable[[float], str],
            holds: Callable[[float], bool]) -> Finding | None:
    """The largest share of llama.cpp's figure, a time, that hobbit has where both have it."""
    places, failures = [], []
    for own in cases:
        baseline = study.baseline(own)
        if baseline is None or not baseline.median(figure) > 0:
            continue
        share = ratio(own, baseline, figure)
        if share > 0:
            places.append((share, f"{show(share)} ({own.place})"))
        else:
            failures.append(f"none for {own.place} ({own.outcome()})")
    return worst(places, failures, holds)


def as_fast(share: float) -> str:
    return f"{times(1 / share)} as fast"


def fastest(data: pd.DataFrame) -> Finding | None:
    study = Study(data, "peers")
    ratios, failures, without = [], [], {}
    for own in (c for c in study.hobbit() if c.place.limit and c.place.n_gen):
        others = [c for c in study.cases if c.engine != HOBBIT and c.place == own.place]
        without |= {c.engine: None for c in others if not c.median("decode_ts") > 0}
        best = max((c for c in others if c.median("decode_ts") > 0), key=lambda c: c.median("decode_ts"), default=None)
        if best and own.median("decode_ts") > 0:
            share = ratio(own, best, "decode_ts")
            ratios.append((share, f"{times(share)} ({best.name()}, {own.place})"))
        elif others:
            failures.append(f"{own.name()} has no speed for {own.place} ({own.outcome()})")
    ratios.sort(key=lambda pair: -pair[0])
    words = [f"to the best other: {', '.join(text for _, text in ratios)}"] if ratios else []
    words += [f"no speed somewhere (failed or killed): {', '.join(without)}"] if without else []
    kept = not failures and all(share > 1 for share, _ in ratios)
    return Finding("; ".join(words + failures), kept) if words or failures else None


def resident(figure: str) -> Callable:
    def judge(data: pd.DataFrame) -> Finding | None:
        study = Study(data, "resident")
        return against(study.hobbit(), study, figure, lambda share: change(share - 1), lambda share: share < 1.02)
    return judge


def where_it_fits(data: pd.DataFrame) -> Finding | None:
    study = Study(data, "fits")
    roomy = [c for c in study.hobbit() if not c.place.limit or c.first("of_model") >= 1]
    return against(roomy, study, "whole_s", lambda share: change(share - 1), lambda share: share < 1.02)


def no_dip(data: pd.DataFrame) -> Finding | None:
    """Each budget against the best that any smaller one reached."""
    dips, broken = [], []
    study = Study(data, "fits")
    for name, speed in (("the whole command", "commands_per_s"), ("decode", "decode_ts")):
        for cases in study.hobbit_by("limit"):
            best = 0.0
            for case in cases:
                found = case.median(speed)
                if found > 0 and best:
                    share = found / best
                    dips.append((-share, f"{change(share - 1)} to the best with less ({name} of {case.place})"))
                elif best:
                    broken.append(f"{case.outcome()}: {case.place}")
                best = max(best, np.nan_to_num(found))
    return worst(dips, broken, lambda dip: -dip >= 0.95)


def contended(figure: str) -> Callable:
    def judge(data: pd.DataFrame) -> Finding | None:
        study = Study(data, "contended")
        beside = [c for c in study.hobbit() if c.place.busy]
        return against(beside, study, figure, as_fast, lambda share: 1 / share >= 0.98)
    return judge


def sooner(data: pd.DataFrame) -> Finding | None:
    study = Study(data, "startup")
    limited = [c for c in study.hobbit() if c.place.limit]
    return against(limited, study, "first_token_s", as_fast, lambda share: share < 1)


def within_budget(data: pd.DataFrame) -> Finding | None:
    """Peak RSS against the budget where it is known, else against the limit."""
    own = data[(data.engine == HOBBIT) & (data.limit > 0)]
    killed = own.outcome.str.startswith("killed")
    known, unknown = own[~killed & own.peak_rss.notna()], int((~killed & own.peak_rss.isna()).sum())
    n, budget = len(known) + int(killed.sum()), known.budget.fillna(known.limit)
    if n == 0:
        return None
    within, share = int((known.peak_rss <= budget).sum()), known.peak_rss / budget
    words = [f"{within} of {n}"]
    if len(share):
        at = share.idxmax()
        words.append(f"at most {percent(share[at])} ({known.model[at]} in {size(budget[at])})")
    words += [f"{killed.sum()} killed"] if killed.any() else []
    words += [f"{unknown} failed without a figure"] if unknown else []
    return Finding("; ".join(words), within == n)


def identical(data: pd.DataFrame) -> Finding | None:
    """Dynamic precision is meant to differ, so its records do not count."""
    exact = data[(data.engine == HOBBIT) & (data.compared > 0)]
    exact = exact[[raw.get("hobbit_precision") != "dynamic" for raw in exact.raw]]
    equal = exact.equal.fillna(0)
    found = f"{equal.sum():.0f} of {exact.compared.sum():.0f} evaluations"
    return Finding(found, bool((equal == exact.compared).all())) if len(exact) else None


def long_runs(data: pd.DataFrame, judge: Callable, holds: Callable[[float], bool]) -> Finding | None:
    """The worst of hobbit's long runs, of equal ones the last. A run that failed without a figure breaks the promise."""
    judged, broken = [], []
    for run in data[(data.engine == HOBBIT) & data.label.isin(LONG)].itertuples():
        name = f"{run.model}, {run.variant}" if run.variant else run.model
        found = judge(run)
        if found:
            judged.insert(0, (found[0], f"{found[1]} ({name})"))
        elif run.outcome != "ok":
            broken.append(f"{run.outcome}: {name}")
    return worst(judged, broken, holds)


def flat(part: str, within: float) -> Callable:
    """The end differs by at most a share from the moment when a tenth of the tokens was evaluated."""
    def judge(run) -> tuple[float, str] | None:
        ends = warm_and_end(run.raw)
        warm, end = (moment.get(part) for moment in ends) if ends else (None, None)
        if warm is None or end is None:
            return None
        more = end / max(warm, 1) - 1
        words = f"{warm} to {end}" if part == "fds" else f"{'-' if end < warm else '+'}{size(abs(end - warm))}, {change(more)}"
        return abs(more), words
    return lambda data: long_runs(data, judge, lambda share: share <= within)


def steady(data: pd.DataFrame) -> Finding | None:
    def judge(run) -> tuple[float, str] | None:
        slower = 1 - run.last_tenth / run.first_tenth
        words = f"{digits(run.first_tenth)} to {digits(run.last_tenth)} t/s, {change(-slower)}"
        return (slower, words) if np.isfinite(slower) else None
    return long_runs(data, judge, lambda slower: slower <= 0.05)


# A promise, the checks that must all hold, and the cost to a user where it is not kept.
PROMISES = [
    ("decodes faster than every other engine in the same memory", {"": fastest},
     "where the ratio is below 1x, that part of the best other engine's speed: give more memory (a model that fits is left "
     "to llama.cpp), or take that engine there"),
    ("overhead with everything in memory below 2 % of the median token and of the mean",
     {"median": resident("median_ms"), "mean": resident("mean_ms")},
     "so much slower tokens if you have hobbit keep the experts of a model that fits (--expert-cache 100%)"),
    ("where the model fits, the whole command within 2 % of llama.cpp's; with more memory never slower by 5 %",
     {"whole command": where_it_fits, "dip": no_dip},
     "so much more time for a short command on a model that fits, or with the memory that is named"),
    ("beside busy processes not slower than llama.cpp by 2 %",
     {"prompt": contended("prefill_s"), "decode": contended("mean_ms")},
     "where the ratio is below 1x, that part of llama.cpp's speed while other programs compute"),
    ("first token before llama.cpp's under the limit", {"": sooner}, "a longer wait for the first word"),
    ("peak RSS within the budget in every run", {"": within_budget},
     "leave head-room above --mem-budget: a control group of that size would end the run"),
    ("logits bit-identical to llama.cpp's in exact precision", {"": identical},
     "at a near tie another word than llama.cpp's"),
    ("2,000 tokens: RSS and heap within 2 %, no more open files, last tenth not 5 % slower than the first",
     {"RSS": flat("rss", 0.02), "heap": flat("heap", 0.02), "open files": flat("fds", 0), "speed": steady},
     "so much of the speed, or so much memory, at the end of a long answer (under pressure: beside a program that keeps "
     "taking memory)"),
]


def claims(data: pd.DataFrame) -> list[dict[str, str]]:
    """The promises as rows."""
    rows = []
    for promise, checks, cost in PROMISES:
        findings = {name: check(data) for name, check in checks.items()}
        found = "; ".join(f"{name} {finding.words if finding else 'no records'}".strip() for name, finding in findings.items())
        if any(finding and not finding.kept for finding in findings.values()):
            kept = "**no**"
        elif not all(findings.values()):
            kept, cost = "**not measured**", "not known"
        else:
            kept, cost = "yes", ""
        rows.append({"promise": promise, "found": found, "kept": kept, "what a \"no\" costs you": cost})
    return rows
