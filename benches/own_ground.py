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
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BIN = Path(os.environ.get("BIN") or ROOT / "target/release").resolve()
MODELS = Path(os.environ.get("MODELS") or ROOT / "target/prove").resolve()
PLAN = tomllib.loads((HERE / "own_ground.toml").read_text())
ARMS, RUNS, CLAIMS = PLAN["arms"], PLAN["runs"], PLAN["claims"]
PROSE = ROOT / "models/demo-heldout-prose.txt"
# Losses on random weights are noise, so models of random weights get a bound of 10 %.
BOUND = {"demo-wide": "1%", "fine": "1%", "deep": "1%"}
CORES = len(os.sched_getaffinity(0))


def listed(value) -> list:
    return value if isinstance(value, list) else [value]


def said(*words, **more) -> str:
    return subprocess.run([str(word) for word in words], check=True, stdout=subprocess.PIPE, text=True, **more).stdout


def flags_of(arm: str, model: str, low: str | None = None) -> str:
    """An arm's flags for a model. Low versions are of type `low` where one is given, else hobbit chooses it."""
    flags = f"--max-loss {BOUND.get(model, '10%')} --low auto" if arm == "best" else ARMS[arm].get("flags", "")
    if low and re.search("--low|--preset (hobbit|fate)", flags):
        flags = flags.replace(" --low auto", "") + f" --low {low}"
    return flags


def measured(model: Path, low: str, shares: list[str]) -> tuple[Path, Path]:
    """A profile with mixes for shares of the experts in memory, beside the model, and a path table; made once."""
    made, paths = model.with_suffix(".profile.json"), model.with_suffix(".paths")
    if not made.exists():
        words = [
            "--max-loss",
            BOUND.get(model.stem, "10%"),
            "--low",
            low,
            "--expert-cache",
            ",".join(shares),
            "--no-widths",
        ]
        said(
            BIN / "gguf-tools",
            "profile",
            model,
            "--text",
            PROSE,
            "--tokens",
            512,
            "--context",
            128,
            *words,
            "--path-table",
            paths,
            "-o",
            made,
        )
    return made, paths


def packed(model: Path) -> Path:
    """EdgeMoE's model: the fewest bits within a predicted loss of 2 %, by its bounds."""
    made, widths = model.with_suffix(".edgemoe.gguf"), model.with_suffix(".widths.json")
    if not made.exists():
        said(
            BIN / "gguf-tools",
            "profile",
            model,
            "--text",
            PROSE,
            "--tokens",
            256,
            "--widths",
            "q2_k,q4_k",
            "-o",
            widths,
        )
        said(BIN / "gguf-tools", "pack", model, "--profile", widths, "--max-loss", "2%", "--bounds", "-o", made)
    return made


def records_of_devices(run: dict) -> list[dict]:
    """Virtual time of benches/devices. A model is SHAPE, or SHAPE:TYPE."""
    found = []
    bench = lambda *words: said(
        "cargo", "bench", "--bench", "devices", "--", "--machine", run["ground"], *words, cwd=ROOT
    )
    lengths = lambda at: ",".join(map(str, sorted({test[at] for test in run["tests"]})))
    requests = ["--prompt-tokens", lengths(0), "--decode-tokens", lengths(1)]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "rows.json"
        for model in listed(run["model"]):
            shape, _, kind = model.partition(":")
            place = ["--shapes", shape, "--json", out, *(["--type", kind] if kind else [])]
            bench(*place, "--decode-tokens", 1, "--flags", "exact=--cpu-helper off")  # Writes the model.
            name = re.compile(rf"devices-{re.escape(shape)}-\d+{f'-{kind}' if kind else ''}\.gguf", re.IGNORECASE)
            file = next(file for file in (ROOT / "target/tmp").iterdir() if name.fullmatch(file.name))
            made, paths = measured(
                file, "q4_0" if re.search("f16|f32", model) else "q2_k", [f"{percent}%" for percent in run["percent"]]
            )
            mixes = Path(scratch) / "mixes.json"  # The bench copies it to where it lies already.
            mixes.write_bytes(made.read_bytes())
            place += ["--profiles", f"{shape}={mixes}", "--path-tables", f"{shape}={paths}", *requests]
            for percent in run["percent"]:
                arms = []
                for arm in (arm for arm in run["arms"] if arm != "llama"):
                    least = f" --device-cache {run['least']}%" if ARMS[arm].get("least") else ""
                    arms.append(f"{arm}={flags_of(arm, model)}{least}")
                bench(*place, "--percent", percent, "--flags", ";".join(arms))
                for row in json.loads(out.read_text())["rows"]:
                    arm = "llama" if row["flags"] is None else row["row"]
                    base = {
                        "model": model,
                        "place": f"{percent} %",
                        "arm": arm,
                        "kl": row["kl"],
                        "outcome": row["error"] or "ok",
                    }
                    found += [
                        base
                        | {
                            "prompt": one["prompt_tokens"],
                            "decode": one["decode_tokens"],
                            "prompt_ts": one["prompt_tokens"] / one["prompt_seconds"],
                            "decode_ts": one["decode_tokens"] / one["decode_seconds"],
                            "bytes": row["link_bytes"],
                        }
                        for one in row["requests"]
                    ] or [base]
    return found


def records_on_disk(run: dict) -> list[dict]:
    """hobbit-bench: every arm in order and then in reverse, each in a process and a control group of its own."""
    found = []
    for model in listed(run["model"]):
        file = MODELS / f"{model}.gguf"
        _, paths = measured(file, "q4_0" if re.search("f16|f32", model) else "q2_k", listed(run.get("cache", "10%")))
        for place in listed(run.get("cache") or run["limit"]):
            for prompt, decode in run["tests"]:
                for arm in [*run["arms"], *reversed(run["arms"])]:
                    own_file = packed(file) if arm == "edgemoe" and "q4" in model else file
                    words = [
                        "-m",
                        own_file.name,
                        "--prompt-file",
                        PROSE,
                        "-p",
                        0,
                        "-n",
                        0,
                        "-pg",
                        f"{prompt},{decode}",
                        "-r",
                        1,
                        "--no-warmup",
                        "--no-roofline",
                    ]
                    words += ["--expert-cache", place, "--io", "direct"] if "cache" in run else []
                    words += (
                        ["-t", 2 * CORES, "--baseline-only"]
                        if arm == "llama"
                        else ["-t", CORES, *flags_of(arm, model).split()]
                    )
                    words += (
                        ["--path-table", paths] if re.search("path-table|preset edgemoe", flags_of(arm, model)) else []
                    )
                    limits = ["--limit", run["limit"]] if "limit" in run else []
                    limits += ["--disk-limit", run["disk"]] if "disk" in run else []
                    print(f"{model}, {place}, {prompt} + {decode}: {ARMS[arm]['name']}", file=sys.stderr)
                    line = said(
                        HERE / "study.py",
                        "bench",
                        "--label",
                        "own-ground",
                        "--variant",
                        arm,
                        *limits,
                        "--",
                        *words,
                        cwd=MODELS,
                    )
                    own = json.loads(line)
                    found.append(
                        {
                            "model": model,
                            "place": place,
                            "arm": arm,
                            "prompt": prompt,
                            "decode": decode,
                            "prompt_ts": own["hobbit_prompt_ts"],
                            "decode_ts": own["hobbit_decode_ts"],
                            "bytes": own["hobbit_decode_bytes"],
                            "kl": None,
                            "outcome": own["hobbit_outcome"],
                        }
                    )
    return found


def text_of(model: str, name: str) -> Path:
    """A held-out text; SHUFFLED is the lines of all of a model's in random order, which have no locality."""
    if name != "shuffled.txt":
        return ROOT / f"models/{name}"
    files = sorted((ROOT / "models").glob("fine-heldout-*.txt" if model == "deep" else f"{model}-heldout-*.txt"))
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
    random.Random(16).shuffle(lines)
    (MODELS / name).write_text("".join(lines))
    return MODELS / name


def records_of_loss(run: dict) -> list[dict]:
    """benches/quality.py on a bundled model: increase of perplexity and KL divergence against the exact model."""
    found = []
    for model in run["model"]:
        arms = []
        for arm in run["arms"]:
            arms += ["--arm", f"{arm}: {flags_of(arm, model, 'q2_k')}"]
        caches = ["--cache", *(place.rstrip("%") for place in run["cache"])]
        file = MODELS / f"{model}.gguf"  # A copy: its profile lies beside it.
        file.write_bytes((ROOT / f"models/{model}.gguf").read_bytes())
        measured(file, "q2_k", run["cache"])
        texts = [word for text in run["texts"] for word in ("--text", text_of(model, text))]
        whole = ["--whole-windows"] if run.get("prompts") else []
        with tempfile.TemporaryDirectory() as out:
            said(
                HERE / "quality.py",
                "--bin",
                BIN,
                "--model",
                file,
                *texts,
                *caches,
                *arms,
                *whole,
                "--windows",
                run["windows"],
                "--questions",
                0,
                "--out",
                out,
            )
            for row in json.loads((Path(out) / f"quality-{model}-own.json").read_text())["rows"]:
                found.append(
                    {
                        "model": model,
                        "text": row["text"],
                        "place": f"{row['cache_percent']:g}%",
                        "arm": row["arm"],
                        "loss": row["cost"]["value"],
                        "kl": row["kl"]["value"],
                        "bytes": row["bytes_per_token"],
                        "outcome": "ok",
                    }
                )
    return found


def records_of_routes(run: dict) -> list[dict]:
    """Replays and recalls of a trained model's own routes: fitted on one text, judged on another."""
    sys.path.append(str(HERE / "policies"))
    import papers

    found = []
    for model in run["model"]:
        traces = []
        for text in run["texts"]:
            traces.append(MODELS / f"{model}-{text}.trace")
            if not traces[-1].exists():
                words = "-c 512 -b 512 -ub 1 -t 1 --expert-cache 50% --predictor stacked-gate --prefetch off"
                words += " --prefetch-distance 3"
                said(
                    BIN / "hobbit-perplexity",
                    "-m",
                    ROOT / f"models/{model}.gguf",
                    "-f",
                    ROOT / f"models/{text}",
                    "--chunks",
                    run["windows"],
                    *words.split(),
                    "--trace",
                    traces[-1],
                )
        (subject,) = papers.use(BIN / "hobbit-sim", ["--budgets", ",".join(run["budgets"]), model, *map(str, traces)])
        mixed = [
            "--low-bytes",
            "31%",
            "--low-share",
            papers.LOW_SHARE,
            *papers.THRESHOLDS,
            "--upgrade",
            "off",
            "--slots",
            "global",
        ]
        for budget in run["budgets"]:
            weights = ["--policy-weights", subject.fitted(budget, "global")]
            rows = papers.replay(
                subject.evaluation, *mixed, *weights, policies="lru,lfu,hobbit,learned", budgets=[budget]
            )
            exact = papers.replay(
                subject.evaluation, "--slots", "global", policies="lru,lfu,edgemoe,learned", budgets=[budget]
            )
            for kind, of in [("penalty", rows), ("hits", exact)]:
                for (_, _, policy), row in of.items():
                    value = row["penalty"] if kind == "penalty" else papers.hit_rate(row)
                    found.append({"model": model, "place": budget, "arm": policy, kind: value, "outcome": "ok"})
        shares = {f"top-1, {distance} ahead": (subject.best_scores(distance) or [None])[0] for distance in (1, 2, 3)}
        recalls = {
            "gate": subject.found("stacked-gate", 1),
            "percentile": subject.found("cross-layer", 1),
            "path-table": subject.found("path-table", 1),
        }
        shares |= {name: recall[0] for name, recall in recalls.items() if recall}
        shares["top-score"] = papers.active_of_top(subject)
        found += [
            {"model": model, "place": "", "arm": name, "share": share, "outcome": "ok"}
            for name, share in shares.items()
            if share
        ]
    return found


def run(names: list[str], records: Path) -> None:
    for name in names:
        print(f"== {name}", file=sys.stderr)
        made = {"disk": records_on_disk, "loss": records_of_loss, "routes": records_of_routes}.get(
            RUNS[name]["ground"], records_of_devices
        )(RUNS[name])
        kept = [one for one in read(records) if one["run"] != name]
        lines = [json.dumps(one) for one in kept + [{"run": name} | one for one in made]]
        records.parent.mkdir(parents=True, exist_ok=True)
        records.write_text("".join(f"{line}\n" for line in lines))


def read(*files: Path) -> list[dict]:
    return [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]


# Metrics by name: each reads its figure from a record.
METRICS = {
    "decode": lambda one: one["decode_ts"],
    "prompt": lambda one: one["prompt_ts"],
    "request": lambda one: 1 / (one["prompt"] / one["prompt_ts"] + one["decode"] / one["decode_ts"]),
    "penalty": lambda one: one["penalty"],
    "share": lambda one: one["share"],
    "loss": lambda one: one["loss"],
}


def values(records: list[dict], run: str, arm: str, metric: str) -> dict[tuple, float]:
    """Medians of an arm by place and test; ARM@MODEL those of one model. RUN/ARM is of another run, in whose places the
    same memory holds more experts."""
    other, _, arm = arm.rpartition("/")
    arm, _, model = arm.partition("@")
    found: dict[tuple, list] = {}
    for one in records:
        if (one["run"], one["arm"]) == (other or run, arm) and model in ("", one["model"]) and one["outcome"] == "ok":
            kind = "" if model else re.sub(r"[-:](f16|f32|q\d\w*)$", "", one["model"])
            place = one["place"] if len(listed(RUNS[run].get("cache", RUNS[run].get("budgets", "")))) > 1 else ""
            key = (kind, place, one.get("text"), one.get("prompt"), one.get("decode"))
            found.setdefault(key, []).append(METRICS[metric](one))
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
        found.append(Row(claim, baseline, of(claim["of"]), *(of(arm + model) for arm in ours)))
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


def run_table(name: str, records: list[dict]) -> str:
    """Every arm of a run, model by model."""
    lines = []
    own = [one for one in records if one["run"] == name]
    groups = dict.fromkeys((one["model"], one.get("text"), one["place"]) for one in own)
    for model, text, place in groups:
        there = [one for one in own if (one["model"], one.get("text"), one["place"]) == (model, text, place)]
        where = ", ".join(filter(None, (model, text, place)))
        first = None
        for arm in RUNS[name]["arms"]:
            here = [one for one in there if one["arm"] == arm]
            ok = [one for one in here if one["outcome"] == "ok"]
            if not ok:
                lines.append([where, ARMS[arm]["name"], here[0]["outcome"] if here else "not run"] + [""] * 3)
                continue
            median = lambda key, some=ok: statistics.median(one[key] for one in some)
            if RUNS[name]["ground"] == "loss":
                lines.append(
                    [
                        where,
                        ARMS[arm]["name"],
                        f"{100 * median('loss'):+.2f} %",
                        f"{1e3 * median('kl'):.1f}",
                        f"{median('bytes') / 1024:.0f}",
                        "",
                    ]
                )
                continue
            speed = median("decode_ts")
            first = first or speed
            prompts = dict.fromkeys(one["prompt"] for one in ok)
            shown = ", ".join(
                f"{statistics.median(one['prompt_ts'] for one in ok if one['prompt'] == n):.3g}" for n in prompts
            )
            lines.append(
                [
                    where,
                    ARMS[arm]["name"],
                    shown,
                    f"{speed:.3g}",
                    f"{speed / first:.2f}x",
                    f"{median('bytes') / 1e6:.1f}",
                ]
            )
    lengths = ", ".join(dict.fromkeys(str(prompt) for prompt, _ in RUNS[name].get("tests", [])))
    heading = ["", "arm", f"prompt of {lengths}, t/s", "decode, t/s", "to the first row", "MB a token"]
    if RUNS[name]["ground"] == "loss":
        heading = ["", "arm", "perplexity", "KL, millinats", "KiB a token", ""]
    before = None
    for line in lines:
        before, line[0] = line[0], "" if line[0] == before else line[0]
    return table(heading, lines)


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
