"""Pictures of the studies, of the quality bench and of hobbit-sim, as SVG files that do not depend on when they were
drawn."""

from __future__ import annotations

import json
import math
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

from .records import BASELINE, HOBBIT, Case, Study, digits, grouped, percent

matplotlib.use("svg")
from matplotlib import pyplot as plt  # noqa: E402

# Paul Tol's colours, which colour-blind readers can tell apart.
COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777", "#ee8866", "#44bb99", "#000000"]
plt.rcParams.update({
    "svg.hashsalt": "hobbit", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3,
    "axes.prop_cycle": plt.cycler(color=COLOURS), "axes.spines.top": False, "axes.spines.right": False,
    "lines.markersize": 4, "legend.frameon": False, "figure.facecolor": "white",
})
GIB = 1 << 30


def panels(n: int, height: float = 3.4, columns: int = 2):
    """A figure with n panels, so many in a row."""
    columns = min(n, columns)
    rows = math.ceil(n / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.6 * columns, height * rows), squeeze=False, layout="constrained")
    for unused in axes.flat[n:]:
        unused.set_axis_off()
    return figure, list(axes.flat)


def save(figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    print(f"drawn: {path}")


def lines(axis, series: dict[str, list], title: str, x: str, y: str) -> None:
    """Lines by name, of (x, y) or of (x, y, least, most); axes begin at 0."""
    for name, points in series.items():
        points = sorted(point for point in points if np.isfinite(point[:2]).all())
        if points:
            xs, ys, *ends = zip(*points)
            line, = axis.plot(xs, ys, "--k" if name.startswith("roofline") else "o-" if len(xs) < 25 else "-", label=name)
            if ends:
                axis.vlines(xs, *ends, color=line.get_color())
    axis.set(title=title, xlabel=x, ylabel=y)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.legend()


def bars(axis, rows: list[tuple[str, list[float], str]], title: str, x: str, parts: tuple[str, ...] = ()) -> None:
    """Bars from top to bottom: a name, the lengths of the parts, words behind the bar."""
    left = np.zeros(len(rows))
    for at in range(max(len(values) for _, values, _ in rows)):
        width = np.nan_to_num([values[at] if at < len(values) else 0 for _, values, _ in rows])
        axis.barh(range(len(rows)), width, left=left, color=COLOURS[at], label=parts[at] if parts else None)
        left += width
    for at, (_, _, words) in enumerate(rows):
        axis.text(left[at], at, " " + words, va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axis.invert_yaxis()
    axis.set(title=title, xlabel=x, xlim=(0, 1.25 * max(left.max(), 1e-9)))
    axis.grid(axis="y", visible=False)
    if parts:
        axis.legend(loc="lower right")


def point(case: Case, x: float, figure: str) -> tuple:
    values = case.ok[figure].dropna()
    return (x, values.median(), values.min(), values.max()) if len(values) else (x, math.nan, math.nan, math.nan)


def speed_bars(study: Study):
    """Decode speed of every engine or variant, a panel for each place."""
    places = study.by_place()
    figure, axes = panels(len(places), 0.9 + 0.24 * max(map(len, places.values())))
    for axis, (place, cases) in zip(axes, places.items()):
        # Each variant of an ablation has the same llama.cpp beside it.
        baselines = [case for case in cases if case.engine == BASELINE]
        cases = [case for case in cases if case not in baselines[1:]]
        rows = [(case.name().removeprefix("hobbit, "), [case.median("decode_ts")],
                 case.shown("decode_ts") if case.median("decode_ts") > 0 else case.outcome().split(":")[0]) for case in cases]
        bars(axis, rows, str(place), "decode, tokens per second")
    return figure


def curve(study: Study):
    """Decode speed by memory: hobbit, llama.cpp and the roofline, a panel for each model and test."""
    groups = grouped(study.hobbit(), lambda case: (case.place.model, case.place.test()))
    figure, axes = panels(len(groups))
    for axis, ((model, test), cases) in zip(axes, groups.items()):
        series: dict[str, list] = {}
        for case in cases:
            x, other = case.place.limit / GIB, study.baseline(case)
            series.setdefault(case.name(), []).append(point(case, x, "decode_ts"))
            if other:
                series.setdefault(BASELINE, []).append(point(other, x, "decode_ts"))
        most = max(y for points in series.values() for _, y, *_ in points)
        series["roofline: if only reading took time"] = [
            (case.place.limit / GIB, case.median("roofline_ts")) for case in cases]
        lines(axis, series, f"{model}, {test}", "memory limit of the process, GiB", "decode, tokens per second")
        axis.set_ylim(top=1.3 * most)
        axis.axvline(cases[0].runs.raw.iloc[0]["model_size"] / GIB, color="#888", linestyle=":")
        axis.text(cases[0].runs.raw.iloc[0]["model_size"] / GIB, 0.3 * most, "size of the model ", rotation=90, ha="right")
    return figure


def stalls(study: Study, by_memory: bool = False):
    """Waiting for reads and everything else in a token of hobbit's."""
    groups = grouped(study.hobbit(), lambda case: case.place.model if by_memory else case.place.room())
    figure, axes = panels(len(groups), 1.0 + 0.24 * max(map(len, groups.values())))
    for axis, (place, cases) in zip(axes, groups.items()):
        rows = []
        for case in cases:
            stall, token = case.median("stall_ms"), case.median("token_ms")
            name = f"{percent(case.median('in_memory'))} of experts" if by_memory else case.variant or case.place.test()
            rows.append((name, [stall, token - stall], f"{digits(stall)} of {digits(token)} ms"))
        bars(axis, rows, place, "ms per token", ("waiting for reads", "everything else"))
    return figure


def fits(study: Study):
    figure, axes = panels(3 * len(groups := grouped(study.cases, lambda case: case.place.model)), 3.0, columns=3)
    panel = iter(axes)
    for model, cases in groups.items():
        for what, measure in (("whole command, seconds", "whole_s"), ("prompt, tokens per second", "prompt_ts"),
                              ("decode, tokens per second", "decode_ts")):
            of_name = grouped(cases, lambda case: case.name())
            series = {name: [point(case, 100 * case.first("of_model"), measure) for case in own]
                      for name, own in of_name.items()}
            lines(next(panel), series, model, "memory, % of the model", what)
    return figure


def sweep(study: Study, x_label: str, x):
    """Decode speed by one quantity, both engines."""
    of_name = grouped([c for c in study.cases if c.engine in (HOBBIT, BASELINE)], lambda case: case.name())
    figure, axes = panels(1)
    series = {name: [point(case, x(case), "decode_ts") for case in cases] for name, cases in of_name.items()}
    lines(axes[0], series, "Decode speed", x_label, "decode, tokens per second")
    return figure


def over_time(study: Study, with_speed: bool):
    """The resident set of every engine, and where there are many tokens the speed."""
    places = {place: [case for case in cases if len(case.runs.raw.iloc[0].get("hobbit_series") or []) > 1]
              for place, cases in study.by_place().items()}
    figure, axes = panels(len(places) * (2 if with_speed else 1))
    panel = iter(axes)
    for place, cases in places.items():
        raws = {case.name() + ("" if case.outcome() == "ok" else f" ({case.outcome()[:6]})"): case.runs.raw.iloc[0]
                for case in cases}
        axis = next(panel)
        memory = {name: [(at["t_ns"] / 1e9, at["rss"] / GIB) for at in raw["hobbit_series"]] for name, raw in raws.items()}
        lines(axis, memory, str(place), "seconds since the process started", "resident set, GiB")
        if place.limit:
            axis.axhline(place.limit / GIB, color="black", linestyle="--", label="limit")
            axis.set_ylim(top=max(axis.get_ylim()[1], 1.1 * place.limit / GIB))
        axis.legend(fontsize=6)
        if with_speed:
            speed = {}
            for name, raw in raws.items():
                chunks = np.array_split(np.array(raw["hobbit_steps_ns"]) / 1e9, 60)
                ends = np.cumsum([chunk.sum() for chunk in chunks])
                speed[name] = [(end - chunk.sum() / 2, len(chunk) / chunk.sum()) for end, chunk in zip(ends, chunks)]
            lines(next(panel), speed, str(place), "seconds of decoding", "decode, tokens per second")
    return figure


def draw(data: pd.DataFrame, directory: Path) -> None:
    """Every picture that the records allow."""
    n_expert = lambda study: {case.place.model: int(case.first("n_expert")) for case in study.hobbit()}
    pictures = {
        "peers": ("peers", speed_bars), "peers-memory": ("peers", lambda study: over_time(study, False)),
        "papers-stalls": ("papers", stalls), "fits": ("fits", fits),
        "curve": ("curve", curve), "curve-stalls": ("curve", lambda study: stalls(study, by_memory=True)),
        "ablation": ("ablation", speed_bars), "ablation-stalls": ("ablation", stalls),
        "context": ("context", lambda study: sweep(study, "tokens in the context", lambda case: case.place.n_depth)),
        "experts": ("experts", lambda study: sweep(study, "experts of a layer",
                                                   lambda case: n_expert(study)[case.place.model])),
        "long": ("long", lambda study: over_time(study, True)),
    }
    for name, (label, make) in pictures.items():
        study = Study(data, label)
        if study.hobbit():
            save(make(study), directory / f"{name}.svg")


def quality(path: Path) -> None:
    """Loss against bytes read per token, beside the smaller quants that an arm has to beat."""
    rows = json.loads(path.read_text())["rows"]
    groups = grouped(rows, lambda row: (row["text"], row["cache_percent"]))
    figure, axes = panels(len(groups), 5.0)
    at = lambda row: (row["bytes_per_token"] / (1 << 20), 1e3 * row["kl"]["value"])
    for axis, ((text, cache), own) in zip(axes, groups.items()):
        controls = sorted(at(row) for row in own if row["is_control"])
        # Keep a control only if no smaller one is better.
        best = [point for n, point in enumerate(controls) if all(point[1] < other[1] for other in controls[:n])]
        axis.plot(*zip(*best), "--k", label="smaller quants (control)")
        for n, row in enumerate(own):
            (x, y), error = at(row), 1e3 * row["kl"]["uncertainty"]
            axis.errorbar(x, y, [[min(error, y)], [error]], fmt="os^v"[n // 10 % 4], color=COLOURS[n % 10],
                          label=row["arm"])
        axis.set(title=f"{text}, expert cache {cache:g}%", xlabel="MiB of experts read per token",
                 ylabel="KL divergence from exact, millinats")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=6)
    save(figure, path.with_suffix(".svg"))


def simulated(path: Path, output: Path) -> None:
    """What `hobbit-sim replay --json` or `hobbit-sim recall --json` printed."""
    found = json.loads(path.read_text())
    if found and "predictors" in found[0]:
        rows = [row for trace in found for row in trace["predictors"]]
        groups = grouped(rows, lambda row: row["predictor"])
        figure, axes = panels(len(groups))
        for axis, (predictor, own) in zip(axes, groups.items()):
            series = {f"{row['distance']} ahead ({percent(row['recall'])})": [
                (layer["layer"], 100 * layer["recall"]) for layer in row["layers"]] for row in own}
            lines(axis, series, predictor, "layer", "chosen experts that were predicted, %")
    else:
        rows = [row for trace in found for row in trace["replays"]]
        figure, axes = panels(2)
        both = lambda row, part: row["outcome"]["prefill"][part] + row["outcome"]["decode"][part]
        slots = lambda row: np.mean([layer["slots"] for layer in row["outcome"]["layers"]])
        hits = lambda row: 100 * np.divide(both(row, "hits"), both(row, "hits") + sum(
            sum(row["outcome"][phase]["misses"].values()) for phase in ("prefill", "decode")))
        penalty = lambda row: both(row, "penalty") / max(both(row, "tokens"), 1)
        for axis, y, label in ((axes[0], hits, "hits, %"), (axes[1], penalty, "penalty per token")):
            series = {name: [(slots(row), y(row)) for row in own]
                      for name, own in grouped(rows, lambda row: row["policy"]).items()}
            lines(axis, series, "Policies", "slots per layer", label)
    save(figure, output)
