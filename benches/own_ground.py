#!/usr/bin/env python3
"""Runs each paper's system on its own ground, beside its baselines and hobbit, and says whether its claims are reached.

usage: benches/own_ground.py run [RUN...]     runs of own_ground.toml (default: all); records replace the run's old ones
       benches/own_ground.py report           tables of docs/PAPERS.md and results/papers.md, and docs/images/papers.svg
       benches/own_ground.py report --check   changes nothing; fails if a table is not what the records make

Programs are those in $BIN (default: target/release), models go to $MODELS (default: target/prove). Runs on the disk
need root; `prove.sh own-ground` makes the models first. Records: results/<machine>/own-ground.jsonl, or --records.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from own_ground_run import ARMS, CLAIMS, HERE, ROOT, RUNS, listed, records_of, said


def run(names: list[str], records: Path) -> None:
    for name in names:
        print(f"== {name}", file=sys.stderr)
        kept = [one for one in read(records) if one["run"] != name]
        lines = [json.dumps(one) for one in kept + records_of(name)]
        records.parent.mkdir(parents=True, exist_ok=True)
        records.write_text("".join(f"{line}\n" for line in lines))


def read(*files: Path) -> list[dict]:
    return [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]


# Metrics by name, and their keys in records.
METRICS = {"decode": "decode_ts", "prompt": "prompt_ts", "penalty": "penalty", "share": "share", "loss": "loss"}


def values(records: list[dict], run: str, arm: str, metric: str) -> dict[tuple, float]:
    """Medians of an arm by place and test; ARM@MODEL those of one model. RUN/ARM is of another run, in whose places the
    same memory holds more experts."""
    other, _, arm = arm.rpartition("/")
    arm, _, model = arm.partition("@")
    found: dict[tuple, list] = {}
    for one in records:
        is_wanted = (one["run"], one["arm"]) == (other or run, arm) and model in ("", one["model"])
        if is_wanted and one["outcome"] == "ok" and METRICS[metric] in one:
            kind = "" if model else re.sub(r"[-:](f16|f32|q\d\w*)$", "", one["model"])
            place = one["place"] if len(listed(RUNS[run].get("cache", RUNS[run].get("budgets", "")))) > 1 else ""
            key = (kind, place, one.get("text"), one.get("prompt"), one.get("decode"))
            found.setdefault(key, []).append(one[METRICS[metric]])
    return {key: statistics.median(own) for key, own in found.items()}


def found_of(records: list[dict], claim: dict, arm: str, to: list[str]) -> float | None:
    """The claim's figure for an arm: a ratio of speeds to the best of `to` in each test, a share of penalty saved, or a
    mean share or loss."""
    run, metric = claim["run"], claim["metric"]
    own = values(records, run, arm, metric)
    if metric in ("share", "loss"):
        return statistics.fmean(own.values()) if own else None
    base: dict[tuple, float] = {}
    for other in to:
        for key, value in values(records, run, other, metric).items():
            base[key] = max(base.get(key, value), value)
    logs = [math.log(own[key] / base[key]) for key in own if key in base]
    if not logs:
        return None
    ratio = math.exp(statistics.fmean(logs))
    return 1 - ratio if metric == "penalty" else ratio


@dataclass
class Row:
    """A claim and what was found: None where nothing was measured."""

    claim: dict
    baseline: float | None = None
    system: float | None = None
    default: float | None = None
    best: float | None = None

    @property
    def is_loss(self) -> bool:
        return self.claim.get("metric") == "loss"

    @property
    def aim(self) -> float | None:
        return self.claim.get("published", self.baseline)

    @property
    def is_reached(self) -> bool:
        return None not in (self.system, self.aim) and (
            self.system <= self.aim if self.is_loss else self.system >= self.aim
        )

    def shown(self, value: float | None) -> str:
        if value is None:
            return "–"
        if self.is_loss:
            return f"{100 * value:+.2f} %"
        return f"{100 * value:.1f} %" if self.claim.get("metric") in ("penalty", "share") else f"{value:.2f}x"


def rows_of(records: list[dict]) -> list[Row]:
    found = []
    for claim in CLAIMS:
        if "run" not in claim:
            found.append(Row(claim))
            continue
        to = listed(claim.get("to", []))
        model = "@" + to[0].split("@")[1] if to and "@" in to[0] else ""
        of = lambda arm: found_of(records, claim, arm, to)
        baseline = of(to[0]) if claim["metric"] == "loss" and to else None
        ours = claim.get("hobbit", ["default", "best"])
        found.append(Row(claim, baseline, of(claim["of"]), *(of(arm if "@" in arm else arm + model) for arm in ours)))
    return found


def table(heading: list[str], lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [heading, ["---"] * len(heading), *lines])


def claims_table(rows: list[Row], only_headlines: bool) -> str:
    """The papers' claims beside what was found here."""
    lines = []
    for row in rows:
        claim = row.claim
        if only_headlines and not claim.get("headline"):
            continue
        verdict = "yes" if row.is_reached else "not measured" if row.system is None else "no"
        verdict += f": {claim['why']}" if "why" in claim and not row.is_reached else ""
        published = "less than the baseline's" if "published" not in claim else row.shown(claim["published"])
        lines.append(
            [
                claim["paper"],
                f"{claim['text']} ({claim['figure']})",
                published,
                row.shown(row.baseline),
                row.shown(row.system),
                row.shown(row.default),
                row.shown(row.best),
                verdict,
            ]
        )
    heading = ["paper", "claim", "published", "baseline", "reproduced", "hobbit", "hobbit --max-loss", "reached"]
    if only_headlines:
        lines, heading = [line[:3] + line[4:] for line in lines], heading[:3] + heading[4:]
    return table(heading, lines)


def median(records: list[dict], key: str) -> float | None:
    found = [one[key] for one in records if one.get(key) is not None]
    return statistics.median(found) if found else None


def run_table(name: str, records: list[dict]) -> str:
    """Every arm of a run, model by model; of routes, everything that was found."""
    own, ground = [one for one in records if one["run"] == name], RUNS[name]["ground"]
    if ground == "routes":
        kinds = {"penalty": "{:,.0f}", "hits": "{:.1%}", "share": "{:.1%}"}
        lines = [
            [kind, one["place"], one["arm"], form.format(one[kind])]
            for kind, form in kinds.items()
            for one in own
            if kind in one
        ]
        return table(["", "experts in memory", "policy or prediction", ""], lines)
    lines = []
    for model, text, place in dict.fromkeys((one["model"], one.get("text"), one["place"]) for one in own):
        there = [one for one in own if (one["model"], one.get("text"), one["place"]) == (model, text, place)]
        where = ", ".join(filter(None, (model, text, place)))
        first = None
        for arm in RUNS[name]["arms"]:
            here = [one for one in there if one["arm"] == arm]
            ok = [one for one in here if one["outcome"] == "ok"]
            cells = [where, ARMS[arm]["name"]]
            where = ""
            if not ok:
                lines.append(cells + [here[0]["outcome"] if here else "not run"] + [""] * 3)
                continue
            moved = median(ok, "bytes")
            if ground == "loss":
                loss, kl = 100 * median(ok, "loss"), 1e3 * median(ok, "kl")
                lines.append(cells + [f"{loss:+.2f} %", f"{kl:.1f}", f"{moved / 1024:.0f}"])
                continue
            speed = median(ok, "decode_ts")
            first = first or speed
            by_length = [[one for one in ok if one["prompt"] == n] for n in dict.fromkeys(one["prompt"] for one in ok)]
            prompts = ", ".join(f"{median(some, 'prompt_ts'):.3g}" for some in by_length)
            shown = f"{moved / 1e6:.1f}" if moved is not None else ""
            lines.append(cells + [prompts, f"{speed:.3g}", f"{speed / first:.2f}x", shown])
    if ground == "loss":
        return table(["", "arm", "perplexity", "KL, millinats", "KiB a token"], lines)
    lengths = ", ".join(dict.fromkeys(str(prompt) for prompt, _ in RUNS[name].get("tests", [])))
    return table(["", "arm", f"prompt of {lengths}, t/s", "decode, t/s", "to the first row", "MB a token"], lines)


def arms_table() -> str:
    return table(
        ["arm", "settings", "not emulated"],
        [
            [arm["name"], f"`{arm['flags']}`" if arm.get("flags") else "", arm.get("without", "")]
            for arm in ARMS.values()
        ],
    )


def picture(rows: list[Row], out: Path) -> None:
    """One group of bars for each headline claim: the baseline is 1."""
    from lab import plots  # matplotlib, which runs need not have

    shown = [row for row in rows if row.claim.get("headline") and row.system]
    if not shown:
        return
    figure, axis = plots.plt.subplots(figsize=(9, 3.6), layout="constrained")
    series = {
        "the paper's baseline": [1.0 for _ in shown],
        "the paper's system, emulated": [row.system for row in shown],
        "hobbit": [row.default for row in shown],
        "hobbit --max-loss": [row.best for row in shown],
    }
    for at, (label, heights) in enumerate(series.items()):
        places = [x + (at - 1.5) * 0.2 for x in range(len(shown))]
        bars = axis.bar(
            places,
            [height or 0 for height in heights],
            0.19,
            label=label,
            color=["#9aa3ab", "#4477aa", "#2f7d4f", "#7fbf7b"][at],
        )
        axis.bar_label(bars, [f"{height:.2f}" if height else "–" for height in heights], fontsize=7, padding=2)
    for x, row in enumerate(shown):
        axis.hlines(
            row.claim["published"],
            x - 0.4,
            x + 0.4,
            colors="#aa3377",
            linestyles="dashed",
            linewidth=1,
            label="published" if x == 0 else None,
        )
    axis.set_xticks(range(len(shown)), [f"{row.claim['paper']}\n{row.claim['short']}" for row in shown], fontsize=8)
    axis.set_ylabel("speed, to the paper's baseline")
    axis.legend(fontsize=8, ncols=3, loc="upper left")
    axis.margins(y=0.25)
    out.parent.mkdir(parents=True, exist_ok=True)
    plots.save(figure, out)


def filled(page: Path, made: dict[str, str]) -> str:
    """The page with every table between `<!-- own-ground NAME -->` and its end made anew."""
    marked = re.compile(r"^<!-- own-ground (\S+) -->\n.*?^<!-- /own-ground \1 -->$", re.MULTILINE | re.DOTALL)
    return marked.sub(
        lambda found: f"<!-- own-ground {found[1]} -->\n{made[found[1]]}<!-- /own-ground {found[1]} -->",
        page.read_text(),
    )


def report(files: list[Path], check: bool) -> None:
    records = read(*files)
    rows = rows_of(records)
    made = {"headlines": claims_table(rows, True), "claims": claims_table(rows, False), "arms": arms_table()}
    made |= {name: run_table(name, records) for name in RUNS}
    pages = [ROOT / "docs/PAPERS.md", HERE / "results/papers.md"]
    stale = [page for page in pages if filled(page, made) != page.read_text()]
    if check:
        sys.exit(
            f"not what the records make: {', '.join(map(str, stale))}; run benches/own_ground.py report" if stale else 0
        )
    for page in stale:
        page.write_text(filled(page, made))
    picture(rows, ROOT / "docs/images/papers.svg")
    judged = [row for row in rows if row.system is not None]
    print(f"{sum(row.is_reached for row in judged)} of {len(judged)} claims are reached")


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n\nPrograms")[0])
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--records", type=Path, action="append", help="default: every results/*/own-ground.jsonl")
    args = parser.parse_args()
    if args.command == "report":
        return report(args.records or sorted(HERE.glob("results/*/own-ground.jsonl")), args.check)
    if unknown := [name for name in args.runs if name not in RUNS]:
        parser.error(f"no run '{unknown[0]}'; own_ground.toml has {', '.join(RUNS)}")
    machine = said(HERE / "study.py", "machine", ROOT).strip()
    run(args.runs or list(RUNS), args.records[0] if args.records else HERE / f"results/{machine}/own-ground.jsonl")


if __name__ == "__main__":
    main()
