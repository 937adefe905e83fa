"""Checks hobbit on one device: exactness, the parts that only a real device shows, the link, and speed.

The tests in tests/devices/real.rs say what is exact, hobbit-bench measures hobbit and llama.cpp on generated models of
known shapes, with few layers. Each check has a time limit, and the next one runs whatever happened to it. Ctrl-C ends
with the results so far.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TEXT = ROOT / "models/fine-heldout-prose.txt"
# Devices of the tests: virtual time, in their own program only.
TEST_DEVICES = ("LAG", "ORIN")
DISK_GIB = 8


@dataclass
class Check:
    name: str
    result: str  # pass, fail or skip
    detail: str = ""
    seconds: float = 0.0
    rows: list[tuple[str, str]] = field(default_factory=list)  # further lines of the table
    data: object = None


@dataclass
class Ran:
    code: int | None  # None: stopped at the time limit
    output: str

    def records(self) -> list[dict]:
        return [json.loads(line) for line in re.findall(r"^record: (\{.*\})$", self.output, re.MULTILINE)]

    def failure(self, seconds: float) -> str:
        if self.code is None:
            return f"no end within {seconds:.0f} s"
        if self.code < 0:
            return f"died of {signal.Signals(-self.code).name}"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        said = [line for at, line in enumerate(lines) if at > 0 and "panicked at" in lines[at - 1]]
        said = [line.removeprefix("called `Result::unwrap()` on an `Err` value: ") for line in said]
        said = said or [line for line in lines if re.search(r"error|cannot|refuse", line)] or lines
        return f"exit status {self.code}: {said[-1][:200] if said else 'no message'}"


def run(command: Iterable[object], seconds: float, **env: str) -> Ran:
    """Runs a program; at the limit it ends with all that it started."""
    words = [str(word) for word in command]
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **env},
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(max(seconds, 1))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        return Ran(code, out.read())


def test_program(programs: pathlib.Path) -> pathlib.Path | None:
    """The tests of devices: `devices`, or the newest of cargo's. A bench of that name has no tests to list."""
    built = sorted(programs.glob("deps/devices-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [programs / "devices", *built]:
        if path.is_file() and os.access(path, os.X_OK):
            if "real::speeds: test" in run([path, "--list"], 30).output:
                return path
    return None


def test(program: pathlib.Path, name: str, device: str, seconds: float) -> Check:
    """A test of tests/devices/real.rs."""
    words = [program, f"real::{name}", "--exact", "--nocapture", "--test-threads=1"]
    ran = run(words, seconds, HOBBIT_TEST_DEVICE=device)
    records = ran.records()
    if ran.code == 0 and "1 passed" not in ran.output:
        return Check(name, "fail", f"{program} has no test real::{name}")
    skips = [record["skip"] for record in records if "skip" in record]
    notes = [record["note"] for record in records if "note" in record]
    check = Check(name, "fail" if ran.code != 0 else "skip" if skips else "pass", "; ".join(skips or notes))
    check.data = records
    if ran.code != 0:
        check.detail = ran.failure(seconds)
    if name == "architectures":
        judge_architectures(check, ran, records)
    elif name == "speeds" and ran.code == 0:
        check.rows = list(rows_of_speeds(records[-1]))
    return check


def judge_architectures(check: Check, ran: Ran, records: list[dict]) -> None:
    done = [record for record in records if "architecture" in record]
    wrong = [record["architecture"] for record in done if is_wrong(record)]
    kls = [record["kl"] for record in done if record["kl"] is not None]
    counts = f"{len(done) - len(wrong)} of {len(done)} exact" + (f", KL up to {max(kls):.1e}" if kls else "")
    if ran.code == 0 or wrong and ran.code is not None and ran.code > 0:
        check.detail = counts
    else:
        begun = [record["begin"] for record in records if "begin" in record]
        check.detail += f" in {begun[-1] if begun else 'the first'}; {counts} before"
    if wrong:
        check.result = "fail"
        check.detail += f"; not {', '.join(wrong)}"


def is_wrong(record: dict) -> bool:
    """Whether an architecture is not exact. JSON has null for a KL that is infinite or NaN."""
    return "architecture" in record and (not record["pass"] or record["kl"] is None)


SPEEDS = {
    "pinned_gb_s": "copies from pinned memory, GB/s",
    "pageable_gb_s": "copies from ordinary memory, GB/s",
    "node_us": "a small node of a graph, µs",
    "graph_us": "a graph of one node and the wait, µs",
    "read_back_us": "reading 4 bytes back, µs",
}


def rows_of_speeds(record: dict) -> Iterable[tuple[str, str]]:
    for key, label in SPEEDS.items():
        found = record["speeds"][key]
        profiles = ", ".join(f"{name} {profile[key]:.1f}" for name, profile in record["profiles"].items())
        yield label, f"{'none' if found is None else f'{found:.1f}'} (assumed: {profiles})"


@dataclass
class Shape:
    name: str
    preset: str
    layers: int
    # The full model's divided as its layers are: the output's part of the bytes stays.
    vocab: int
    # Percent of the experts in the device's memory, as in 24 GB for the full model, rounded to whole layers.
    percent: int

    def n_cpu_moe(self) -> list[int]:
        """The fewest layers on the CPU that leave no more experts on the device, one more, and all."""
        least = self.layers - self.layers * self.percent // 100
        return sorted({least, min(least + 1, self.layers), self.layers})


SHAPES = [
    Shape("Qwen3-30B-A3B", "qwen3-30b-a3b", 6, 18_992, 50),
    Shape("gpt-oss-120b", "gpt-oss-120b", 4, 22_343, 25),
    Shape("Mixtral-8x7B", "mixtral-8x7b", 4, 4_000, 50),
]
SMALL = ["--embd", "256", "--ff", "256", "--heads", "8"]
# Tokens, repetitions and threads of hobbit-bench: as llama-bench by default, and few.
USUAL, FEW = ["-p", "512", "-n", "64", "-r", "3"], ["-p", "32", "-n", "4", "-r", "1", "-t", "1"]


def available_memory() -> int:
    return int(re.search(r"MemAvailable:\s*(\d+)", pathlib.Path("/proc/meminfo").read_text())[1]) << 10


def speed_of(records: list[dict]) -> dict[str, tuple[float, int]]:
    """Tokens a second of decode and prompt, and layers on the CPU, of the best records."""
    best: dict[str, tuple[float, int]] = {}
    for record in records:
        kind = "decode" if record["n_gen"] else "prompt"
        if record["hobbit_outcome"] == "ok" and record["avg_ts"]:
            best[kind] = max(best.get(kind, (0.0, 0)), (record["avg_ts"], record["n_cpu_moe"]))
    return best


def compared(name: str, ours: list[dict], theirs: list[dict]) -> Check:
    """hobbit's speed and llama.cpp's best, in decode and prompts each."""
    found, best = speed_of(ours), speed_of(theirs)
    if {*found} != {"decode", "prompt"} or {*best} != {"decode", "prompt"}:
        return Check(name, "fail", "hobbit-bench has no figure", data={"hobbit": ours, "llama.cpp": theirs})
    ratios = {kind: found[kind][0] / best[kind][0] for kind in ("decode", "prompt")}
    check = Check(name, "pass", ", ".join(f"{kind} {ratio:.2f}x" for kind, ratio in ratios.items()))
    for kind, ratio in ratios.items():
        (ours_ts, _), (best_ts, n_cpu_moe) = found[kind], best[kind]
        check.rows.append((f"{kind}, t/s", f"{ours_ts:.1f}, llama.cpp {best_ts:.1f} (-ncmoe {n_cpu_moe})"))
    check.data = {"ratios": ratios, "hobbit": ours, "llama.cpp": theirs}
    return check


def shape(args: argparse.Namespace, wanted: Shape, seconds: float) -> Check:
    end = time.monotonic() + seconds
    if shutil.disk_usage(args.models).free < DISK_GIB << 30:
        return Check(wanted.name, "skip", f"needs {DISK_GIB} GiB of disk in {args.models} (--models)")
    with tempfile.TemporaryDirectory(dir=args.models) as directory:
        model = pathlib.Path(directory, "model.gguf")
        words = ["--preset", wanted.preset, "--layers", wanted.layers, "--vocab", wanted.vocab]
        steps = {"model": [args.programs / "gguf-tools", "synth", model, *words, *(SMALL if args.small else [])]}
        bench = [args.programs / "hobbit-bench", "-m", model, "--device", args.device, "--no-roofline", "-o", "jsonl"]
        bench += FEW if args.small else USUAL
        bench += ["--prompt-file", TEXT] if TEXT.is_file() else []
        n_cpu_moe = ",".join(map(str, wanted.n_cpu_moe()))
        # Without mmap llama.cpp has its experts in pinned memory, too.
        baseline = [*bench, "--baseline-only", "--load-mode", "none"]
        steps["llama.cpp"] = [*baseline, "--n-cpu-moe", n_cpu_moe]
        steps["hobbit"] = [*bench, "--expert-cache", "100%", "--device-cache", f"{wanted.percent}%"]
        if args.device == "none":
            steps["llama.cpp"], steps["hobbit"] = baseline, [*bench, "--expert-cache", "100%"]
        outputs = {}
        for step, command in steps.items():
            ran = run(command, end - time.monotonic())
            # One of llama.cpp's divisions may not fit: the others count.
            has_figures = step == "llama.cpp" and speed_of(rows_in(ran.output))
            if ran.code != 0 and not has_figures:
                return Check(wanted.name, "fail", f"{step}: {ran.failure(seconds)}")
            if step == "model" and available_memory() < model.stat().st_size * 1.3 + (1 << 30):
                return Check(wanted.name, "skip", f"{model.stat().st_size / 2**30:.1f} GiB do not fit in memory")
            outputs[step] = ran.output
    return compared(wanted.name, rows_in(outputs["hobbit"]), rows_in(outputs["llama.cpp"]))


def rows_in(output: str) -> list[dict]:
    """hobbit-bench's records, one per line, without the messages around them."""
    return [json.loads(line) for line in re.findall(r'\{"build_commit".*\}$', output, re.MULTILINE)]


EXACT = ("architectures", "early_products_and_events", "promotions", "unified_off", "unified_on", "shrinking")
TESTS = (*EXACT, "speeds")
# Parts of the time; the rest of a check's passes to the next ones.
WEIGHTS = {"architectures": 6.0, **{wanted.name: 4.0 for wanted in SHAPES}}


def verdict(checks: list[Check]) -> str:
    by_name = {check.name: check for check in checks}
    exact = [by_name[name] for name in EXACT if name in by_name]
    # Discrete GPUs refuse it.
    exact = [check for check in exact if (check.name, check.result) != ("unified_on", "skip")]
    if any(is_inexact(check) for check in exact):
        is_exact = "no"
    else:
        is_exact = "yes" if exact and all(check.result == "pass" for check in exact) else "not known"
    counted = [check for check in checks if check.result != "skip"]
    words = [f"exact: {is_exact}", f"{sum(c.result == 'pass' for c in counted)} of {len(counted)} checks pass"]
    ratios = [check.data["ratios"] for check in checks if isinstance(check.data, dict) and "ratios" in check.data]
    if ratios:
        mean = {kind: math.exp(sum(math.log(r[kind]) for r in ratios) / len(ratios)) for kind in ratios[0]}
        speeds = ", ".join(f"{kind} {mean[kind]:.1f}x" for kind in ("decode", "prompt"))
        words.append(f"{speeds} of llama.cpp's best")
    return "; ".join(words)


def is_inexact(check: Check) -> bool:
    """Whether a check found other numbers or ended early. A time limit alone says nothing."""
    is_late = check.detail.startswith("no end")
    return check.result == "fail" and (not is_late or any(is_wrong(record) for record in check.data or []))


def table(checks: list[Check]) -> str:
    lines = [("check", "result", "seconds", "")]
    for check in checks:
        lines.append((check.name.replace("_", " "), check.result, f"{check.seconds:.0f}", check.detail))
        lines += [(f"  {label}", "", "", value) for label, value in check.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    cells = [[line[c].ljust(widths[c]) for c in range(3)] + [line[3]] for line in lines]
    return "\n".join("  ".join(cell).rstrip() for cell in cells)


# Libraries of CUDA, and NVIDIA's wheels that have them.
WHEELS = {"libcublas": "nvidia-cublas", "libcudart": "nvidia-cuda-runtime"}


def missing_wheel(ran: Ran) -> str | None:
    """The wheel with the library without which a program did not start."""
    return next((wheel for library, wheel in WHEELS.items() if ran.code != 0 and library in ran.output), None)


def find_wheels() -> None:
    """Lets programs find the libraries of NVIDIA's wheels in this Python's packages."""
    found = [str(path) for root in sys.path for path in sorted(pathlib.Path(root).glob("nvidia/*/lib"))]
    given = [path for path in [os.environ.get("LD_LIBRARY_PATH")] if path]
    if found:
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(given + found)


def listed(programs: pathlib.Path) -> dict[str, str] | str:
    """Devices by name, or why there is no list."""
    program = programs / "hobbit-bench"
    if not program.is_file():
        return f"{program} is missing: build it with CHECK=1 contrib/cuda.sh, or give its directory"
    ran = run([program, "--list-devices"], 60)
    if missing_wheel(ran):
        find_wheels()
        ran = run([program, "--list-devices"], 60)
    if ran.code != 0:
        wheel = missing_wheel(ran)
        remedy = f"; run {sys.executable} -m pip install {wheel} and try again" if wheel else ""
        remedy += ", or export LD_LIBRARY_PATH=SITE-PACKAGES/nvidia/cu13/lib of a Python that has it" if wheel else ""
        return f"{program} does not start: {ran.failure(60)}{remedy}"
    return dict(re.findall(r"^  (\S+): (.*)$", ran.output, re.MULTILINE))


def chosen(device: str | None, found: dict[str, str] | str) -> tuple[str, str] | None:
    """The device's name, or none and why: only the tests have their devices, and the CPU needs none."""
    if isinstance(found, str):
        return "", found
    if device in (*TEST_DEVICES, "none"):
        return device, ""
    if not found:
        return "", "no GPU found: is it a CUDA build (contrib/cuda.sh), and is NVIDIA's driver installed (nvidia-smi)?"
    if device not in (None, *found):
        return "", f"no device {device}: there are {', '.join(found)}"
    return device or next(iter(found)), ""


def machine(device: str, found: dict[str, str]) -> dict[str, object]:
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    query = ["nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max", "--format=csv"]
    return {
        "device": device,
        "description": found.get(device),
        "nvidia-smi": run(query, 20).output if shutil.which("nvidia-smi") else None,
        "cpu": cpu[1] if cpu else os.uname().machine,
        "cores": len(os.sched_getaffinity(0)),
        "memory_available": available_memory(),
    }


def checks_of(args: argparse.Namespace) -> list[tuple[str, Callable[[float], Check]]]:
    program = None if args.device == "none" else test_program(args.programs)
    why = "there is no device" if args.device == "none" else f"{args.programs} lacks the test program devices"
    checks: list[tuple[str, Callable[[float], Check]]] = []
    for name in TESTS:
        if program:
            checks.append((name, lambda seconds, name=name: test(program, name, args.device, seconds)))
        else:
            checks.append((name, lambda _, name=name: Check(name, "skip", why)))
    for wanted in SHAPES:
        if args.device in TEST_DEVICES:
            checks.append((wanted.name, lambda _, w=wanted: Check(w.name, "skip", "the tests' device has no programs")))
        else:
            checks.append((wanted.name, lambda seconds, w=wanted: shape(args, w, seconds)))
    return checks


def run_in_turn(todo: list[tuple[str, Callable[[float], Check]]], seconds: float, checks: list[Check]) -> None:
    """Runs all checks within this time, and adds each result to `checks` as soon as it is there."""
    start = time.monotonic()
    for at, (name, check) in enumerate(todo):
        weights = [WEIGHTS.get(later, 1.0) for later, _ in todo[at:]]
        left = seconds - (time.monotonic() - start)
        limit, began = left * weights[0] / sum(weights), time.monotonic()
        print(f"{name.replace('_', ' ')}, at most {limit:.0f} s", file=sys.stderr, flush=True)
        try:
            done = check(limit) if left > 1 else Check(name, "skip", "no time is left")
        except Exception as error:  # The next checks run all the same.
            done = Check(name, "fail", f"{type(error).__name__}: {error}")
        done.seconds = time.monotonic() - began
        checks.append(done)


def main() -> int:
    parser = argparse.ArgumentParser(prog="check.sh", description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="?", type=pathlib.Path, default=ROOT / "target/release", metavar="DIRECTORY")
    parser.add_argument("--device", help=f"its name in --list-devices [first of them]; none, {', '.join(TEST_DEVICES)}")
    parser.add_argument("--minutes", type=float, default=10, help="of all checks together [10]")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("gpu-check.json"), help="[gpu-check.json]")
    parser.add_argument("--models", type=pathlib.Path, default=tempfile.gettempdir(), help="directory for models")
    parser.add_argument("--small", action="store_true", help="narrow shapes, to try this script")
    args = parser.parse_args()
    found = listed(args.programs)
    args.device, why = chosen(args.device, found)
    if why:
        print(f"check: {why}", file=sys.stderr)
        return 1
    try:
        args.json.open("a").close()
    except OSError as error:
        print(f"check: cannot write {args.json}: {error.strerror}; give another file with --json", file=sys.stderr)
        return 2
    about, todo, checks = machine(args.device, found), checks_of(args), []
    status = 0
    try:
        run_in_turn(todo, args.minutes * 60, checks)
    except KeyboardInterrupt:
        status = 130
        checks += [Check(name, "skip", "interrupted") for name, _ in todo[len(checks) :]]
    note = " (--small: these speeds mean nothing)" if args.small else ""
    print(table(checks), f"\nrecords: {args.json}", verdict(checks) + note, sep="\n", flush=True)
    record = {"machine": about, "verdict": verdict(checks), "checks": [asdict(check) for check in checks]}
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    return status or int(any(check.result == "fail" for check in checks))


if __name__ == "__main__":
    sys.exit(main())
