"""The tables, each of one study. A row is a dict from heading to text; a heading that ends in `!` is bold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd

from .claims import claims
from .records import (BASELINE, HOBBIT, NAN, Case, Place, Study, change, digits, grouped, of_size, percent, ratio, size,
                      times, warm_and_end)

Row = dict[str, str]


@dataclass
class Table:
    """Rows under headings. In the first `words` columns, text that repeats the row above is left blank."""

    rows: list[Row]
    words: int
    note: str
    files: list[str]

    def markdown(self) -> str:
        heading = list(self.rows[0])
        lines = [heading, ["---" if at < self.words else "---:" for at in range(len(heading))]]
        before: list[str] = []
        for row in self.rows:
            cells = [escape(text) for text in row.values()]
            same = next((at for at, (a, b) in enumerate(zip(cells, before)) if a != b), len(before))
            blank = min(same, self.words - 1)
            before = cells
            lines.append([""] * blank + cells[blank:])
        text = "".join(f"| {' | '.join(line)} |\n" for line in [list(map(escape, heading)), *lines[1:]])
        return f"{text}\n{self.note} Made by `benches/report.py` from {', '.join(self.files)}.\n".replace("\n ", "\n")


def escape(text: str) -> str:
    """Text inside a cell: one line, no markup but **bold**."""
    bold = text.startswith("**") and text.endswith("**") and len(text) > 4
    text = text[2:-2] if bold else text
    marks = {"<": "&lt;", ">": "&gt;", "&": "&amp;", "\n": " "} | {mark: "\\" + mark for mark in "\\|`*[]~$"}
    text = "".join(marks.get(letter, letter) for letter in text)
    return f"**{text}**" if bold else text


def bold(text: str) -> str:
    return f"**{text}**"


def where(place: Place, with_depth: bool = True) -> Row:
    return {"model": place.model, "limit": limit(place), "test": place.test(with_depth)}


def limit(place: Place) -> str:
    return size(place.limit) if place.limit else "none"


def shown(case: Case | None, figure: str) -> str:
    return case.shown(figure) if case else "-"


def faster(own: float) -> str:
    return bold(times(own))


def slower(own: float) -> str:
    return faster(1 / own) if own else "-"


def versus(heading: str, unit: str, own: Case | None, other: Case | None, figure: str, compare: Callable = faster,
           compared: str = "ratio") -> list[tuple[str, str]]:
    """hobbit's figure, llama.cpp's and how they compare. Pairs, as headings repeat in a row."""
    return [(f"{heading}, {unit}", shown(own, figure)), (f"llama.cpp, {unit}", shown(other, figure)),
            (compared, compare(ratio(own, other, figure)))]


class Heading(str):
    """A heading that may stand in a row several times."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def row(words: Row, *pairs: list[tuple[str, str]], **more: str) -> Row:
    return {Heading(key): text for key, text in [*words.items(), *sum(pairs, []), *more.items()]}


def own_bold(case: Case, text: str) -> str:
    return bold(text) if case.engine == HOBBIT else text


def peers(study: Study):
    """Limits are those of a memory control group, whose peak includes the page cache. The baseline is llama.cpp."""
    for cases in study.by_place().values():
        for case in cases:
            others = [c.median("decode_ts") for c in cases if c.engine != case.engine]
            others = [speed for speed in others if speed > 0]
            to_best = case.median("decode_ts") / max(others) if others else NAN
            outcome = case.outcome()
            yield where(case.place) | {
                "engine": own_bold(case, case.name()),
                "prompt, t/s": digits(case.median("prompt_ts")),
                "decode, t/s": own_bold(case, digits(case.median("decode_ts"))),
                "decode, to the best other": own_bold(case, times(to_best)) if to_best > 0 else "-",
                "peak RSS": of_size(case.runs.peak_rss.max(), case.place.limit),
                "control group's peak": size(case.runs.cgroup_peak.max()),
                "equal to the baseline": equality(case),
                "outcome": outcome if outcome == "ok" else bold(outcome),
            }


def equality(case: Case) -> str:
    """The least that a run has in common with the baseline."""
    if case.logits() != "-":
        return f"bit-identical logits {case.logits()}"
    texts = [(raw["hobbit_text_equal"], raw["hobbit_text_chars"]) for raw in case.runs.raw if raw.get("hobbit_text_chars")]
    return "{} of {} characters".format(*min(texts, key=lambda pair: pair[0] / pair[1])) if texts else "-"


def papers(study: Study):
    """Ratios say how many times as fast as llama.cpp hobbit is."""
    tests = sorted({(c.place.n_prompt, c.place.n_gen, c.place.n_depth) for c in study.cases})
    for (model, bytes_), cases in grouped(study.cases, lambda c: (c.place.model, c.place.limit)).items():
        engines = grouped(cases, lambda c: (c.engine,) if c.engine == BASELINE else (c.engine, c.variant, c.flags))
        for name, figure, compare in (("prefill, s", "prefill_s", slower), ("decode, t/s", "decode_ts", faster)):
            ratios = []
            for own in engines.values():
                at = {(c.place.n_prompt, c.place.n_gen, c.place.n_depth): c for c in own}
                words = {"model": model, "limit": size(bytes_) if bytes_ else "none", "figure": name}
                headings = [(test, f"[{test[0]}, {test[1]}]" + (f" @ d{test[2]}" if test[2] else "")) for test in tests]
                yield words | {"engine": own_bold(own[0], own[0].name())} | {
                    heading: shown(at.get(test), figure) for test, heading in headings}
                if own[0].engine == HOBBIT:
                    ratios.append(words | {"engine": f"{own[0].name()}, ratio"} | {
                        heading: compare(ratio(c := at.get(test), c and study.baseline(c), figure))
                        for test, heading in headings})
            yield from ratios


def fits(study: Study):
    """The whole command lasts from the start of the process to its end. Each run follows an equal one in the same
    memory and finds what that left in the page cache. Ratios say how many times as fast as llama.cpp hobbit is."""
    for case in sum(study.hobbit_by("limit"), []):
        other = study.baseline(case)
        known = lambda c, figure: c if c and c.median(figure) > 0 else None
        speeds = [versus(f"{what}, hobbit", "t/s", known(case, figure), known(other, figure), figure)
                  for what, figure in (("prompt", "prompt_ts"), ("decode", "decode_ts"))]
        words = {"model": case.place.model, "test": case.place.test(), "variant": case.variant, "budget": limit(case.place),
                 "of the model": percent(case.first("of_model"))}
        yield row(words, versus("whole command, hobbit", "s", case, other, "whole_s", slower), *speeds)


def curve(study: Study):
    """llama.cpp has the same limit as hobbit in the same row. The roofline is the speed if only reading took time."""
    for case in sum(study.hobbit_by("in_memory"), []):
        other = study.baseline(case)
        yield {
            "model": case.place.model, "engine": case.name(), "test": case.place.test(),
            "experts in memory": percent(case.median("in_memory")), "limit": limit(case.place),
            "decode, t/s": bold(shown(case, "decode_ts")), "llama.cpp, t/s": shown(other, "decode_ts"),
            "ratio": times(ratio(case, other, "decode_ts")), "hits": percent(case.median("hit_rate")),
            "read per token": size(case.median("bytes_per_token")), "roofline, t/s": digits(case.median("roofline_ts")),
            "of the roofline": percent(case.median("roofline_share")),
        }


def routes(study: Study):
    """Both engines take experts and weights of every token from a recording of the real model. Predictions for later
    layers come from it too, with a recall of 80 % unless the variant names another. "At once" is the time that reading
    and multiplying would take without ever waiting for each other, as a share of the measured time."""
    for case in study.hobbit():
        whole = [c for c in study.hobbit() if not c.place.limit and c.place.model == case.place.model]
        other = study.baseline(case)
        other = other if other and other.variant == case.variant else None
        later = case.median("later_ts")
        yield {
            "model": case.place.model, "limit": limit(case.place), "variant": case.variant,
            "experts in memory": percent(case.median("in_memory")), "decode, t/s": bold(shown(case, "decode_ts")),
            "later repetitions, t/s": digits(later),
            "of everything in memory": percent(later / whole[0].median("later_ts") if whole else NAN),
            "llama.cpp, t/s": shown(other, "decode_ts"), "ratio": times(ratio(case, other, "decode_ts")),
            "99th of 100 tokens, ms": digits(case.median("p99_ms")), "hits": percent(case.median("hit_rate")),
            "read per token": size(case.median("bytes_per_token")), "at once": percent(case.median("efficiency")),
            "logits with the same bits": case.logits(),
        }


def efficiency(study: Study):
    """Exact, without a limit of memory but with a share of the experts in memory. Slower disks are the same disk behind
    a control group's limit. "At once" is the time that reading and multiplying would take without ever waiting for each
    other, as a share of the measured time. Looking ahead is `--predictor stacked-gate`."""
    room = lambda c: round(100 * c.median("in_memory"))
    for case in (c for c in study.hobbit() if c.variant == "none"):
        ahead = next((c for c in study.hobbit() if c.variant != "none" and (c.place, room(c)) == (case.place, room(case))), None)
        of_ahead = lambda figure: ahead.median(figure) if ahead else NAN
        yield {
            "model": case.place.model, "experts in memory": percent(case.median("in_memory")),
            "disk": f"{case.place.disk / 1e9:.1f} GB/s" if case.place.disk else "as it is",
            "decode, t/s": bold(shown(case, "decode_ts")), "at once": percent(case.median("efficiency")),
            "hits": percent(case.median("hit_rate")), "read per token": size(case.median("bytes_per_token")),
            "looking ahead, t/s": shown(ahead, "decode_ts"),
            "looking ahead, ratio": faster(ratio(ahead, case, "decode_ts")),
            "looking ahead, at once": percent(of_ahead("efficiency")),
            "looking ahead, read per token": size(of_ahead("bytes_per_token")),
        }


def ablation(study: Study):
    """Variants in the order in which they were measured, against the first of them."""
    for cases in study.by_place().values():
        own = [case for case in cases if case.engine == HOBBIT]
        # llama.cpp was the same beside every variant.
        for case in own + [case for case in cases if case.engine == BASELINE][:1]:
            yield where(case.place) | {
                "variant": (case.variant or HOBBIT) if case.engine == HOBBIT else case.engine,
                "decode, t/s": shown(case, "decode_ts"), "to the first": faster(ratio(case, own[0], "decode_ts")),
                "read per token": size(case.median("bytes_per_token")),
                "waiting for reads": percent(case.median("stall_share")), "hits": percent(case.median("hit_rate")),
            }


def context(study: Study):
    """"""
    yield from sweep(study, "tokens in the context", lambda case: case.place.n_depth)


def experts(study: Study):
    """"""
    yield from sweep(study, "experts of a layer", lambda case: int(case.first("n_expert")))


def sweep(study: Study, quantity: str, of: Callable[[Case], int]):
    for case in sorted(study.hobbit(), key=of):
        words = where(case.place, with_depth=False) | {"variant": case.variant, quantity: str(of(case))}
        yield row(words, *(versus(f"{what}, hobbit", "t/s", case, study.baseline(case), figure)
                           for what, figure in (("prompt", "prompt_ts"), ("decode", "decode_ts"))))


def resident(study: Study):
    """Less is better; below zero hobbit is faster."""
    overhead = lambda own: change(own - 1)
    for case in study.hobbit():
        other = study.baseline(case)
        median = versus("median token", "ms", case, other, "median_ms", lambda own: bold(overhead(own)), "overhead")
        mean = versus("mean token", "ms", case, other, "mean_ms", overhead, "overhead")
        yield row(where(case.place) | {"engine": case.name()}, median, mean, [("logits with the same bits", case.logits())])


def contended(study: Study):
    """Each busy process keeps one core. "Kept" is the speed beside them as a share of the speed alone."""
    for case in (c for c in study.cases if c.place.busy and c.engine in (HOBBIT, BASELINE)):
        same = lambda c: (c.place, c.engine, c.variant, c.flags)
        alone = next((c for c in study.cases if same(c) == (replace(case.place, busy=0), *same(case)[1:])), None)
        kept = [[(f"{what} alone, t/s", shown(alone, figure)), ("beside them, t/s", shown(case, figure)),
                 ("kept", bold(percent(ratio(case, alone, figure))))]
                for what, figure in (("prompt", "prompt_ts"), ("decode", "decode_ts"))]
        words = {"engine": own_bold(case, case.name()), "busy processes": str(case.place.busy)}
        yield row(where(case.place) | words, *kept)


def startup(study: Study):
    """Until the context is open, and until the logits of the first evaluation. Ratios say how many times as fast as
    llama.cpp hobbit is."""
    for case in study.hobbit():
        pair = (case, study.baseline(case))
        yield row(where(case.place) | {"engine": case.name()}, versus("load", "s", *pair, "load_s", slower),
                  versus("first token", "s", *pair, "first_token_s", slower))


def long(study: Study):
    """RSS, heap in use and open files when a tenth of the tokens was evaluated and when all were."""
    for case in study.cases:
        for run in case.runs.itertuples():
            warm, end = warm_and_end(run.raw) or ({}, {})
            largest = max([moment["rss"] for moment in run.raw.get("hobbit_series") or []] + [run.peak_rss])
            part = lambda moment, name: size(NAN if moment.get(name) is None else moment[name])
            yield {
                "model": case.place.model, "limit": limit(case.place), "engine": case.name(),
                "tokens": str(len(run.raw.get("hobbit_steps_ns") or [])),
                "first tenth, t/s": digits(run.first_tenth), "middle tenth, t/s": digits(run.middle_tenth),
                "last tenth, t/s": digits(run.last_tenth),
                "RSS at 10 %": part(warm, "rss"), "RSS at the end": part(end, "rss"),
                "largest RSS": of_size(largest, case.place.limit),
                "heap at 10 %": part(warm, "heap"), "heap at the end": part(end, "heap"),
                "files at 10 %": str(warm.get("fds", "-")), "files at the end": str(end.get("fds", "-")),
            }


# Makers of rows, with the number of columns that hold words.
STUDIES = {peers: 4, papers: 4, fits: 3, curve: 3, routes: 3, efficiency: 3, ablation: 4, context: 4, experts: 4, resident: 4,
           contended: 4, startup: 4, long: 3}
NAMES = ["claims"] + [make.__name__ for make in STUDIES]


def table(name: str, data: pd.DataFrame) -> Table | None:
    """A table by name; None where no record belongs to it."""
    if name == "claims":
        note = "Judged from the records alone; where several count, the worst is named."
        return Table(claims(data), 4, note, sorted(set(data.file)))
    make, words = next((make, words) for make, words in STUDIES.items() if make.__name__ == name)
    study = Study(data, *(["long", "pressure"] if name == "long" else [name]))
    rows = list(make(study))
    note = f"{' '.join((make.__doc__ or '').split())} {study.threads()}".strip()
    return Table(rows, words, note, sorted(set(study.rows.file))) if rows else None
