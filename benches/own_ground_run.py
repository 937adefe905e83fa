"""What benches/own_ground.py runs: records of devices, disks, losses and routes."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import tomllib
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BIN = Path(os.environ.get("BIN") or ROOT / "target/release").resolve()
MODELS = Path(os.environ.get("MODELS") or ROOT / "target/prove").resolve()
PLAN = tomllib.loads((HERE / "own_ground.toml").read_text())
ARMS, RUNS, CLAIMS = PLAN["arms"], PLAN["runs"], PLAN["claims"]
PROSE = ROOT / "models/demo-heldout-prose.txt"
JUDGE = ROOT / "models/deep.gguf"
JUDGED_TEXT = ROOT / "models/fine-heldout-prose.txt"
BOUND = 0.01
# Shares of the experts in memory at which the judge's mixes are measured.
SHARES = ["15%", "25%", "50%"]
CORES = len(os.sched_getaffinity(0))


def listed(value) -> list:
    return value if isinstance(value, list) else [value]


def said(*words, **more) -> str:
    return subprocess.run([str(word) for word in words], check=True, stdout=subprocess.PIPE, text=True, **more).stdout


def number(share: str) -> float:
    return float(share.rstrip("%"))


def profile(model: Path, *words) -> None:
    said(BIN / "gguf-tools", "profile", model, *words)


@cache
def mixes(low: str) -> list[dict]:
    """Mixes of the trained judge. A model of random weights cannot tell what a mix loses."""
    made = MODELS / f"deep-{low}.json"
    if not made.exists():
        words = [
            "--max-loss",
            f"{BOUND:.0%}",
            "--low",
            low,
            "--expert-cache",
            ",".join(SHARES),
            "--no-widths",
            "--threads",
            1,
        ]
        profile(JUDGE, "--text", JUDGED_TEXT, "--tokens", 2048, "--context", 512, *words, "-o", made)
    return json.loads(made.read_text())["mixes"]


def best(share: str, low: str) -> str:
    """Flags of the mix with the fewest bytes that raises the judge's perplexity by at most 1 %, measured at the largest
    share up to this one, as --max-loss chooses."""
    places = [one for one in mixes(low) if number(one["expert_cache"]) <= number(share)]
    at = max(places, key=lambda one: number(one["expert_cache"]))
    fits = [one for one in at["mixes"] if one["loss"] + one["error"] <= BOUND]
    mix = min(fits, key=lambda one: one["bytes_per_token"])["mix"]
    names = {"cache_bias": 0, "substitute": 0, "keep_top": 1, "drop": 0, "t1": 1, "t2": 1}
    flags = [f"--{name.replace('_', '-')} {mix[name]:.6g}" for name, off in names.items() if mix[name] != off]
    return " ".join(flags + [f"--low {low}"] * (mix["t1"] < 1))


def low_of(model: str) -> str:
    """Four bits of floats, two of smaller types (HOBBIT 5.1)."""
    return "q4_0" if re.search("f16|f32", model) else "q2_k"


def flags_of(arm: str, share: str, low: str, is_bundled: bool = False) -> str:
    flags = best(share, low) if arm == "best" else ARMS[arm].get("flags", "")
    # `--low auto` has no smaller type for narrow experts.
    return f"{flags} --low {low}" if is_bundled and re.search("--preset (hobbit|fate)", flags) else flags


def path_table(model: Path, text: Path = PROSE) -> Path:
    """Paths of the text that is run then: hindsight, which favours what foretells by them."""
    made = model.with_suffix(".paths")
    if not made.exists():
        unused = model.with_suffix(".shares.json")
        context = ["--tokens", 512, "--context", 128, "--shares", "67/30/3", "--no-widths", "-o", unused]
        profile(model, "--text", text, *context, "--path-table", made)
    return made


def packed(model: Path) -> Path:
    """EdgeMoE's model: the fewest bits within a predicted loss of 2 %, by its bounds."""
    made, widths = model.with_suffix(".edgemoe.gguf"), model.with_suffix(".widths.json")
    if not made.exists():
        profile(model, "--text", PROSE, "--tokens", 256, "--widths", "q2_k", "-o", widths)
        said(BIN / "gguf-tools", "pack", model, "--profile", widths, "--max-loss", "2%", "--bounds", "-o", made)
    return made


def of_devices(run: dict) -> list[dict]:
    """Virtual time of benches/devices. A model is SHAPE, or SHAPE:TYPE."""
    found = []
    bench = lambda *words: said("cargo", "bench", "--bench", "devices", "--", *words, cwd=ROOT)
    lengths = lambda at: ",".join(map(str, sorted({test[at] for test in run["tests"]})))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "rows.json"
        for model in listed(run["model"]):
            shape, _, kind = model.partition(":")
            place = ["--machine", run["ground"], "--shapes", shape, "--json", out, *(["--type", kind] if kind else [])]
            bench(*place, "--decode-tokens", 1, "--flags", "exact=--cpu-helper off")  # Writes the model.
            name = re.compile(rf"devices-{re.escape(shape)}-\d+{f'-{kind}' if kind else ''}\.gguf", re.IGNORECASE)
            (file,) = [file for file in (ROOT / "target/tmp").iterdir() if name.fullmatch(file.name)]
            is_bundled = shape == JUDGE.stem
            paths = path_table(file, ROOT / "models/fine-heldout-dialogue.txt" if is_bundled else PROSE)
            place += ["--prompt-tokens", lengths(0), "--decode-tokens", lengths(1)]
            for percent in run["percent"]:
                arms = []
                for arm in (arm for arm in run["arms"] if arm != "llama"):
                    flags = flags_of(arm, f"{percent}%", low_of(model), is_bundled)
                    flags += f" --device-cache {run['least']}%" if ARMS[arm].get("least") else ""
                    flags += f" --path-table {paths}" if "path-table" in flags else ""
                    arms.append(f"{arm}={flags}")
                bench(*place, "--percent", percent, "--flags", ";".join(arms))
                for row in json.loads(out.read_text())["rows"]:
                    arm = "llama" if row["flags"] is None else row["row"]
                    flags = re.sub(r" --path-table \S+", "", row["flags"] or "")  # A path of this machine.
                    base = {"model": model, "place": f"{percent} %", "arm": arm, "flags": flags}
                    base |= {"outcome": row["error"] or "ok", "bytes": row["link_bytes"]}
                    tests = [
                        one for one in row["requests"] if [one["prompt_tokens"], one["decode_tokens"]] in run["tests"]
                    ]
                    found += [base | speeds(one) for one in tests] or [base]
    return found


def speeds(request: dict) -> dict:
    prompt, decode = request["prompt_tokens"], request["decode_tokens"]
    rates = {"prompt_ts": prompt / request["prompt_seconds"], "decode_ts": decode / request["decode_seconds"]}
    return {"prompt": prompt, "decode": decode} | rates


def on_disk(run: dict) -> list[dict]:
    """hobbit-bench: every arm in order and then in reverse, each in a process and a control group of its own."""
    found = []
    for model in listed(run["model"]):
        file = MODELS / f"{model}.gguf"
        for place in listed(run.get("cache") or run["limit"]):
            for prompt, decode in run["tests"]:
                for arm in [*run["arms"], *reversed(run["arms"])]:
                    flags = "" if arm == "llama" else flags_of(arm, run.get("share", place), low_of(model))
                    own_file = packed(file) if arm == "edgemoe" and "q4" in model else file
                    words = ["-m", own_file.name, "--prompt-file", PROSE, "-p", 0, "-n", 0, "-pg", f"{prompt},{decode}"]
                    words += ["-r", 1, "--no-warmup", "--no-roofline"]
                    words += ["-t", 2 * CORES, "--baseline-only"] if arm == "llama" else ["-t", CORES, *flags.split()]
                    words += ["--expert-cache", place, "--io", "direct"] if "cache" in run else []
                    words += ["--path-table", path_table(file)] if re.search("path-table|preset edgemoe", flags) else []
                    limits = ["--limit", run["limit"]] if "limit" in run else []
                    limits += ["--disk-limit", run["disk"]] if "disk" in run else []
                    print(f"{model}, {place}, {prompt} + {decode}: {ARMS[arm]['name']}", file=sys.stderr)
                    study = [
                        HERE / "study.py",
                        "bench",
                        "--label",
                        "own-ground",
                        "--variant",
                        arm,
                        *limits,
                        "--",
                        *words,
                    ]
                    own = json.loads(said(*study, cwd=MODELS))
                    one = {
                        "model": model,
                        "place": place,
                        "arm": arm,
                        "flags": flags,
                        "prompt": prompt,
                        "decode": decode,
                    }
                    one |= {"prompt_ts": own["hobbit_prompt_ts"], "decode_ts": own["hobbit_decode_ts"]}
                    read = own["hobbit_decode_bytes"]
                    per_token = None if read is None else read / decode
                    found.append(one | {"bytes": per_token, "outcome": own["hobbit_outcome"]})
    return found


def text_of(name: str) -> Path:
    """A held-out text of the judge; `shuffled.txt` is the lines of all in random order, which have no locality."""
    if name != "shuffled.txt":
        return ROOT / f"models/{name}"
    files = sorted((ROOT / "models").glob("fine-heldout-*.txt"))
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
    random.Random(16).shuffle(lines)
    (MODELS / name).write_text("".join(lines))
    return MODELS / name


def of_losses(run: dict) -> list[dict]:
    """benches/quality.py on the judge: increase of perplexity and KL divergence against the exact model."""
    found = []
    # "best" has the flags of its share, so each share is a run.
    for share in run["cache"]:
        arms = [word for arm in run["arms"] for word in ("--arm", f"{arm}: {flags_of(arm, share, 'q2_k', True)}")]
        texts = [word for text in run["texts"] for word in ("--text", text_of(text))]
        whole = ["--whole-windows"] if run.get("prompts") else []
        words = ["--bin", BIN, "--model", JUDGE, *texts, "--cache", share.rstrip("%"), *arms, *whole, "--questions", 0]
        with tempfile.TemporaryDirectory() as out:
            said(HERE / "quality.py", *words, "--windows", run["windows"], "--out", out)
            (made,) = Path(out).glob("quality-*-own.json")
            for row in json.loads(made.read_text())["rows"]:
                one = {"model": JUDGE.stem, "text": row["text"], "place": share, "arm": row["arm"], "outcome": "ok"}
                one |= {"loss": row["cost"]["value"], "kl": row["kl"]["value"], "bytes": row["bytes_per_token"]}
                found.append(one)
    return found


def of_routes(run: dict) -> list[dict]:
    """Replays and recalls of the judge's own routes: fitted on one text, judged on another."""
    sys.path.append(str(HERE / "policies"))
    import papers

    traces = []
    for text in run["texts"]:
        traces.append(MODELS / f"{JUDGE.stem}-{text}.trace")
        if not traces[-1].exists():
            place = ["-m", JUDGE, "-f", ROOT / f"models/{text}", "--chunks", run["windows"], "--trace", traces[-1]]
            words = "-c 512 -b 512 -ub 1 -t 1 --expert-cache 50% --predictor stacked-gate --prefetch off"
            said(BIN / "hobbit-perplexity", *place, *words.split(), "--prefetch-distance", 3)
    name = JUDGE.stem
    (subject,) = papers.use(BIN / "hobbit-sim", ["--budgets", ",".join(run["budgets"]), name, *map(str, traces)])
    mixed = ["--low-bytes", "31%", "--low-share", papers.LOW_SHARE, *papers.THRESHOLDS, "--upgrade", "off"]
    one_cache = ["--slots", "global"]
    found = []
    for budget in run["budgets"]:
        weights = ["--policy-weights", subject.fitted(budget, "global")]
        replay = lambda policies, *words: papers.replay(
            subject.evaluation, *words, *one_cache, policies=policies, budgets=[budget]
        )
        rows, exact = replay("lru,lfu,hobbit,learned", *mixed, *weights), replay("lru,lfu,edgemoe,learned")
        base = lambda arm: {"model": name, "place": budget, "arm": arm, "outcome": "ok"}
        found += [base(policy) | {"penalty": row["penalty"]} for (_, _, policy), row in rows.items()]
        found += [base(policy) | {"hits": papers.hit_rate(row)} for (_, _, policy), row in exact.items()]
    shares = {f"top-1, {ahead} ahead": (subject.best_scores(ahead) or [None])[0] for ahead in (1, 2, 3)}
    predictors = {"gate": "stacked-gate", "percentile": "cross-layer", "path-table": "path-table"}
    recalls = {arm: subject.found(predictor, 1) for arm, predictor in predictors.items()}
    shares |= {arm: recall[0] for arm, recall in recalls.items() if recall}
    shares["top-score"] = papers.active_of_top(subject)
    base = {"model": name, "place": "", "outcome": "ok"}
    return found + [base | {"arm": arm, "share": share} for arm, share in shares.items() if share]


def records_of(name: str) -> list[dict]:
    ground = {"disk": on_disk, "loss": of_losses, "routes": of_routes}.get(RUNS[name]["ground"], of_devices)
    return [{"run": name} | one for one in ground(RUNS[name])]
