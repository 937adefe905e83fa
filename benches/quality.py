#!/usr/bin/env python3
"""Measures what dynamic precision, packs and smaller quants cost in quality, at equal memory.

    benches/quality.py                                                # the bundled models, all texts, the default arms
    benches/quality.py --windows 4 --cache 25                         # a quick look
    benches/quality.py --jobs 1                                       # with the time of a token
    benches/quality.py --arms benches/quality/arms/prompts.txt --whole-windows
    benches/quality.py --model mixtral.gguf --text wiki.txt --arm 'low: --low q2_k --t1 0.5'

An arm is a name and a line of flags as hobbit-cli takes them. Each model is read on each text with each share of cache
by every arm, and each arm is compared with the exact model, token by token. The hardest control is always there: the
same model as a smaller quant that reads as many bytes per token.

hobbit-perplexity and gguf-tools do the work: build them first with `cargo build --release --workspace`. The tables and
the numbers (.md, .json) go to --out. The exit code is 1 if something cannot be measured, whatever the verdicts say.
"""

import argparse
import concurrent.futures
import json
import math
import os
import pathlib
import platform
import re
import sys
import tempfile
import time

import quality_arms
import quality_run
from quality_arms import Arm, Refused, Subject, Workshop
from quality_run import Found

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Standard errors beyond which a loss is no chance.
ERRORS_MAX = 5.0
# Perplexity that low versions at default thresholds may cost, as a share of the exact model's.
COST_MAX = 0.01
HEADINGS = (
    "arm|perplexity|against exact|KL, millinats|99.9 % KL|same top|task, points|loss|KiB/token|hits|"
    "high / low / skipped|ms/token|control of equal bytes: perplexity, KL|better"
)


def loss(row: dict, same: bool) -> str:
    """Judges a row. `same`: all its numbers are the exact model's."""
    if same:
        return "none"
    cost, kl = row["cost"], row["kl"]
    # JSON has no NaN: predictions that are no numbers come as None.
    if any(estimate[key] is None for estimate in (cost, kl) for key in ("value", "uncertainty")):
        return "beyond"
    is_known = all(estimate["value"] > ERRORS_MAX * estimate["uncertainty"] for estimate in (cost, kl))
    return "beyond" if is_known else "within"


def mean(values: list[float]) -> dict:
    """Mean and standard error."""
    n, value = len(values), sum(values) / len(values)
    variance = sum((one - value) ** 2 for one in values) / max(n - 1, 1)
    return {"value": value, "uncertainty": math.sqrt(variance / n)}


def task(answers: list[bool], exact: list[bool]) -> dict | None:
    """Scores the answers, and compares them with the exact model's question by question."""
    if not answers:
        return None
    change = mean([own - other for own, other in zip(answers, exact)])
    return {"questions": len(answers), "score": mean([float(own) for own in answers]), "change": change}


def new_row(text: str, percent: float, cache_bytes: int, arm: Arm, found: Found, exact: Found, alone: bool) -> dict:
    """Sums up what an arm reached on a text."""
    result, stats = found.result, found.stats
    means = result["means"]
    ratio = means["ppl_ratio"]
    cost = {**ratio, "value": None if ratio["value"] is None else ratio["value"] - 1.0}
    speed = stats["tokens_per_second"]
    row = {
        "text": text,
        "cache_percent": percent,
        "arm": arm.name,
        "flags": arm.flags,
        "is_control": arm.is_control,
        "fits": arm.expert_bytes <= cache_bytes if arm.is_control else None,
        "is_promised": arm.is_promised,
        "perplexity": means["ppl"]["value"],
        "cost": cost,
        "kl": means["kld"],
        "kl_999": result["kld"]["percentiles"][0][1],
        "same_top": means["same_top"],
        "task": task(found.answers, exact.answers),
        "bytes_per_token": stats["bytes_read"] / max(stats["tokens"], 1),
        "hit_rate": stats["hit_rate"],
        "used": stats["used_shares"],
        "token_ms": 1e3 / speed if alone and speed else None,
        "stats": stats,
        "control": None,
    }
    return row | {"loss": loss(row, result == exact.result)}


def panels(rows: list[dict]) -> list[list[dict]]:
    """The rows of each text and share of cache: those that compare."""
    keys = list(dict.fromkeys((row["text"], row["cache_percent"]) for row in rows))
    return [[row for row in rows if (row["text"], row["cache_percent"]) == key] for key in keys]


def frontier(rows: list[dict]) -> list[dict]:
    """The controls that are worth their bytes, ascending: one that is no better than a smaller one is left out."""
    kept: list[dict] = []
    controls = [row for row in rows if row["is_control"] and row["kl"]["value"] is not None]
    for row in sorted(controls, key=lambda row: (row["bytes_per_token"], row["kl"]["value"])):
        if not kept or row["kl"]["value"] < kept[-1]["kl"]["value"]:
            kept.append(row)
    return kept


def control(size: float, controls: list[dict]) -> dict | None:
    """A smaller quant that reads `size` bytes per token: linear between its two neighbours, or the last one alone."""
    if not controls:
        return None
    less = [row for row in controls if row["bytes_per_token"] <= size]
    more = controls[len(less) :]
    ends = [less[-1], more[0]] if less and more else [(less or more)[-1 if less else 0]]
    first, last = ends[0], ends[-1]
    width = last["bytes_per_token"] - first["bytes_per_token"]
    part = (size - first["bytes_per_token"]) / width if width else 0.0
    between = lambda value: value(first) + part * (value(last) - value(first))
    return {
        "perplexity": between(lambda row: row["perplexity"]),
        "kl": between(lambda row: row["kl"]["value"]),
        "between": [row["arm"] for row in ends],
    }


def compare(rows: list[dict]) -> None:
    """Finds each arm's control."""
    for panel in panels(rows):
        controls = frontier(panel)
        for row in panel:
            if not row["is_control"]:
                row["control"] = control(row["bytes_per_token"], controls)


def is_below(value: float | None, limit: float) -> bool:
    return value is not None and value < limit


def number(estimate: dict, scale: float, decimals: int, sign: str = "") -> str:
    """A value with its standard error."""
    if estimate["value"] is None or estimate["uncertainty"] is None:
        return "no number"
    return f"{scale * estimate['value']:{sign}.{decimals}f} ± {scale * estimate['uncertainty']:.{decimals}f}"


def better(row: dict) -> str:
    """Whether an arm does better than its control."""
    if row["control"] is None:
        return "fits" if row["fits"] else ""
    perplexity = is_below(row["perplexity"], row["control"]["perplexity"])
    kl = is_below(row["kl"]["value"], row["control"]["kl"])
    return {(1, 1): "yes", (1, 0): "perplexity only", (0, 1): "KL only", (0, 0): "no"}[perplexity, kl]


def cells(row: dict) -> list[str]:
    """A row of the table."""
    show = lambda value, form: "-" if value is None else form.format(value)
    asked, used, beside = row["task"], row["used"], row["control"]
    shares = (used[name] for name in ("high", "low", "skipped")) if used else None
    return [
        row["arm"],
        show(row["perplexity"], "{:.3f}"),
        number(row["cost"], 100, 2, "+") + " %",
        number(row["kl"], 1e3, 2),
        show(row["kl_999"] and 1e3 * row["kl_999"], "{:.0f}"),
        number(row["same_top"], 100, 1) + " %",
        f"{100 * asked['score']['value']:.1f} ({number(asked['change'], 100, 2, '+')})" if asked else "-",
        {"none": "none", "within": "below 5 errors", "beyond": "**loss**"}[row["loss"]],
        f"{row['bytes_per_token'] / 1024:.0f}",
        show(row["hit_rate"] and 100 * row["hit_rate"], "{:.1f}%"),
        " / ".join(f"{100 * share:.1f}" for share in shares) + " %" if shares else "-",
        show(row["token_ms"], "{:.2f}"),
        f"{beside['perplexity']:.3f}, {1e3 * beside['kl']:.2f} ({' to '.join(beside['between'])})" if beside else "",
        better(row),
    ]


def tables(rows: list[dict], how: str) -> str:
    """The Markdown tables, one for each text and share of cache."""
    lines = []
    for panel in panels(rows):
        lines += ["", f"**{panel[0]['text']}, expert cache {panel[0]['cache_percent']:g}%, {how}**", ""]
        lines += [f"| {HEADINGS.replace('|', ' | ')} |", "|---" * (HEADINGS.count("|") + 1) + "|"]
        lines += [f"| {' | '.join(cells(row))} |" for row in panel]
    return "\n".join(lines) + "\n"


def verdicts(rows: list[dict]) -> list[dict]:
    """What the documentation promises, and what every arm has to be better than."""
    found = []
    for row in rows:
        of = f"{row['text']}, cache {row['cache_percent']:g}%, {row['arm']}"
        if row["is_promised"]:
            is_kept = is_below(row["cost"]["value"], COST_MAX)
            promise = f"{of}: costs at most {100 * COST_MAX:.0f}% perplexity"
            found.append({"promise": promise, "found": number(row["cost"], 100, 2, "+") + " %", "is_kept": is_kept})
        if row["control"]:
            promise = f"{of}: better than a smaller quant of equal bytes"
            measured = f"against {' to '.join(row['control']['between'])}: {better(row)}"
            found.append({"promise": promise, "found": measured, "is_kept": better(row) == "yes"})
    return found


def measure(args: argparse.Namespace, model: pathlib.Path, arms: list[Arm], directory: pathlib.Path) -> dict:
    """Measures a model with all arms on all texts."""
    started = time.monotonic()
    subject = Subject(model, args.bin)
    texts = args.text or sorted(model.parent.glob(f"{subject.name}-heldout-*.txt"))
    if not texts:
        raise Refused(f"{model}: found no {subject.name}-heldout-*.txt beside it; give --text FILE")
    tokens = min(quality_run.WINDOW * args.windows, 4096) if args.windows else 4096
    workshop = Workshop(subject, directory, args.jobs, (texts[0], tokens))
    ready = workshop.with_controls(arms)
    runner = quality_run.Runner(args.bin, subject, directory, args.whole_windows, args.threads)
    rows, read = [], []
    for path in texts:
        name = path.stem.removeprefix(f"{subject.name}-heldout-")
        asked = args.questions if args.questions is not None else 16 * args.windows if args.windows else 500
        text = runner.text(path, name, args.windows, 0 if args.whole_windows else asked)
        read.append({"name": name, "windows": text.n_windows, "questions": len(text.golds)})
        print(f"{subject.name}, {name}: {text.n_windows} windows, {len(text.golds)} questions", file=sys.stderr)
        exact = runner.measure(text, ready[0], subject.expert_bytes)

        def one(job: tuple[float, Arm]) -> dict:
            percent, arm = job
            cache_bytes = int(subject.expert_bytes * percent / 100)
            found = runner.measure(text, arm, cache_bytes)
            row = new_row(name, percent, cache_bytes, arm, found, exact, args.jobs == 1 and not args.whole_windows)
            print(f"{name}, cache {percent:g}%, {arm.name}: {row['perplexity']:.3f}", file=sys.stderr)
            return row

        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            rows += pool.map(one, [(percent, arm) for percent in args.cache for arm in ready])
    compare(rows)
    return {
        "host": {"cpu": cpu(), "cores": os.cpu_count(), "os": platform.platform()},
        "model": subject.name,
        "window": quality_run.WINDOW,
        "whole_windows": args.whole_windows,
        "threads": args.threads,
        "texts": read,
        "seconds": time.monotonic() - started,
        "verdicts": verdicts(rows),
        "rows": rows,
    }


def cpu() -> str:
    """The processor's name."""
    found = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return found.group(1) if found else platform.machine()


def report(args: argparse.Namespace, record: dict) -> None:
    """Prints the tables and verdicts of a model, and writes them."""
    how = "one batch a window" if args.whole_windows else "token by token"
    found = tables(record["rows"], how)
    print(f"\n# {record['model']}\n{found}")
    for verdict in record["verdicts"]:
        print(f"{'OK    ' if verdict['is_kept'] else 'MISSED'} {verdict['promise']}: {verdict['found']}")
    suffix = f"-{args.arms.stem}" if args.arms else "-own" if args.arm else ""
    stem = args.out / f"quality-{record['model']}{suffix}"
    args.out.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
    page = (
        f"# Quality: {record['model']}\n\nMade by `benches/quality.py`, {how}. ± is one standard error, paired by "
        f"token or question. `loss`: perplexity and KL are worse by more than {ERRORS_MAX:.0f} of them.\n{found}"
    )
    stem.with_suffix(".md").write_text(page)
    print(f"written: {stem}.json, .md", file=sys.stderr)


def percents(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise ValueError
    return values


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    path, cores = pathlib.Path, os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=path, action="append", help="exact model; may be repeated [the bundled ones]")
    parser.add_argument("--text", type=path, action="append", help="may be repeated [<model>-heldout-*.txt beside it]")
    parser.add_argument("--cache", type=percents, default=[25.0, 50.0], help="percent of the exact model's experts")
    parser.add_argument("--arms", type=path, help="file of arms, NAME: FLAGS each [benches/quality/arms/default.txt]")
    parser.add_argument("--arm", action="append", default=[], help="one more arm; without --arms no default ones")
    parser.add_argument("--windows", type=int, help="windows of 512 tokens of each text [all]")
    parser.add_argument("--questions", type=int, help="questions about each text [500; with --windows 16 for each]")
    parser.add_argument("--whole-windows", action="store_true", help="each window is one batch, like a prompt")
    parser.add_argument("--jobs", type=int, default=cores, help="rows measured at once; 1 gives times [cores]")
    parser.add_argument("--threads", type=int, default=1, help="threads of each row [1]")
    parser.add_argument("--bin", type=path, default=ROOT / "target/release", help="where the programs are")
    parser.add_argument("--out", type=path, default=ROOT / "target/quality", help="where results go")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    args = parse(words)
    try:
        lists = [args.arms] if args.arms else [] if args.arm else [quality_arms.DEFAULT]
        arms = [arm for path in lists for arm in quality_arms.read_file(path)] + [Arm(line) for line in args.arm]
        quality_arms.check(arms, args.bin)
        models = args.model or [path for path in quality_arms.BUNDLED if path.exists()]
        for model in models:
            with tempfile.TemporaryDirectory() as directory:
                report(args, measure(args, model, arms, pathlib.Path(directory)))
    except Refused as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
