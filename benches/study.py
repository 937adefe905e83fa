#!/usr/bin/env python3
"""Runs programs under limits and prints records as hobbit-bench does, one JSON object a line.

usage: benches/study.py peers -m MODEL --prompt-file TEXT -n TOKENS [--limit SIZE] [--warm] --baseline DIR [PEER...]
           hobbit-cli, llama.cpp (the peer --baseline) and other peers (directories with a program `run`, see
           peers/README.md) continue the same text, there and back, each in a control group of its own and from a cold
           page cache.
       benches/study.py bench [--limit SIZE] [--pressure SIZE] [--disk-limit BYTES/S] [--busy N] -- FLAGS...
           hobbit-bench with FLAGS, in a control group with a process that takes memory again and again, on a slower
           disk, or beside N busy processes.
       benches/study.py machine PATH
           The name of this machine with the disk of PATH, as results/ has it.

Limits need root. hobbit-bench and hobbit-cli are those in $BIN (default: target/release).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(os.environ.get("BIN") or ROOT / "target/release")
CGROUPS = Path("/sys/fs/cgroup")
LOOK_SECONDS = 0.1
PAGE_CACHE_LEFT = 16 << 20
CORES = len(os.sched_getaffinity(0))


def size(text: str) -> int:
    """Bytes of 2.5GiB, 300M or 1000."""
    found = re.fullmatch(r"([\d.]+)\s*([KMGT]?)(i?B)?", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; expected e.g. 2.5GiB")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def disk_of(path: Path) -> Path:
    """The directory in /sys of the whole disk on which a file lies."""
    number = os.stat(path).st_dev
    disk = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    return disk.parent if (disk / "partition").exists() else disk


def machine(path: Path) -> str:
    """As hobbit-bench names it in hobbit_machine."""
    field = lambda file, key: re.search(rf"^{key}\s*:\s*(.*)$", Path(file).read_text(), re.MULTILINE)
    cpu = field("/proc/cpuinfo", "model name")
    gib = round(int(field("/proc/meminfo", "MemTotal")[1].split()[0]) / (1 << 20))
    disk = disk_of(path)
    rotates = disk / "queue/rotational"
    kind = ("nvme" if disk.name.startswith("nvme") else "virtio" if disk.name.startswith("vd") else
            "unknown" if not rotates.exists() else "hdd" if rotates.read_text().strip() == "1" else "ssd")
    words = f"{cpu[1] if cpu else os.uname().machine} {CORES}c {gib}gib {kind}".lower()
    return "-".join(re.findall(r"[a-z0-9]+", words))


def drop_from_page_cache(file: Path) -> None:
    """Pages that are charged to another group would be free memory."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left = lambda: int(subprocess.check_output(["fincore", "--bytes", "--noheadings", "--output", "RES", file]))
    if left() > PAGE_CACHE_LEFT:
        Path("/proc/sys/vm/drop_caches").write_text("1")
        if left() > PAGE_CACHE_LEFT:
            sys.exit(f"{left() >> 20} MiB of {file} stay in the page cache: another process has it mapped")


class Group:
    """A control group, v1 or v2, with a limit of memory, of reads, or of neither: then processes run without a
    group."""

    count = 0

    def __init__(self, model: Path, memory: int | None = None, reads: int | None = None):
        Group.count += 1
        self.dirs: list[Path] = []
        self.memory = memory
        if memory or reads:
            drop_from_page_cache(model)
        v1 = (CGROUPS / "memory/memory.limit_in_bytes").exists()
        swap = len(Path("/proc/swaps").read_text().splitlines()) > 1
        if memory:
            own = self.make(CGROUPS / "memory" if v1 else CGROUPS, "memory")
            (own / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(memory))
            if swap:
                (own / ("memory.memsw.limit_in_bytes" if v1 else "memory.swap.max")).write_text(str(memory) if v1 else "0")
        if reads:
            disk = (disk_of(model) / "dev").read_text().strip()
            own = self.make(CGROUPS / "blkio" if v1 else CGROUPS, "io")
            if v1:
                (own / "blkio.throttle.read_bps_device").write_text(f"{disk} {reads}")
            else:
                (own / "io.max").write_text(f"{disk} rbps={reads}")

    def make(self, mount: Path, controller: str) -> Path:
        own = mount / f"hobbit-study-{os.getpid()}-{Group.count}"
        if mount == CGROUPS:
            (mount / "cgroup.subtree_control").write_text(f"+{controller}")
        if own not in self.dirs:
            own.mkdir()
            self.dirs.append(own)
        return own

    def enter(self) -> None:
        for own in self.dirs:
            (own / "cgroup.procs").write_text("0")

    def number(self, *names: str) -> int | None:
        files = [own / name for own in self.dirs for name in names if (own / name).exists()]
        return int(files[0].read_text()) if files else None

    def close(self) -> None:
        for own in self.dirs:
            for _ in range(50):  # A process that has just ended may still be counted.
                with contextlib.suppress(OSError):
                    own.rmdir()
                    break
                time.sleep(0.02)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Watch(threading.Thread):
    """Looks at a process group until it has ended, and ends it when its time is over."""

    def __init__(self, group: int, seconds: float):
        super().__init__(daemon=True)
        self.group, self.began, self.seconds = group, time.monotonic(), seconds
        self.series: list[dict] = []
        self.peak, self.timed_out, self.over = 0, False, threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.wait(LOOK_SECONDS):
            found = [one for one in map(self.status, Path("/proc").glob("[0-9]*")) if one]
            if found:
                moment = {key: sum(one[key] for one in found) for key in ("rss", "anon", "fds", "threads")}
                # One process alone tells its own peak.
                self.peak = max(self.peak, found[0]["peak"] if len(found) == 1 else moment["rss"])
                t_ns = int(1e9 * (time.monotonic() - self.began))
                self.series.append({"t_ns": t_ns, "heap": None, "tokens": 0} | moment)
            if time.monotonic() - self.began > self.seconds:
                self.timed_out = True
                os.killpg(self.group, signal.SIGKILL)

    def status(self, process: Path) -> dict | None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((process / "stat").read_text().rsplit(") ", 1)[1].split()[2]) != self.group:
                return None
            fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
            kib = lambda key: int(fields.get(key, "0").split()[0]) << 10
            return {"rss": kib("VmRSS"), "peak": kib("VmHWM"), "anon": kib("RssAnon"),
                    "fds": len(os.listdir(process / "fd")), "threads": int(fields["Threads"])}
        return None


def run(group: Group, command: list, timeout: float, answer) -> dict:
    """Runs a command in a group: its outcome, what it answered (read by `answer` from stdout), and what was seen of
    it."""
    began = time.monotonic()
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, start_new_session=True, preexec_fn=group.enter)
    watch = Watch(process.pid, timeout)
    try:
        out, errors = process.communicate()
    finally:
        watch.over.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    seen = {"whole_ns": int(1e9 * (time.monotonic() - began)), "series": watch.series, "peak_rss": watch.peak,
            "cgroup_peak": group.number("memory.peak", "memory.max_usage_in_bytes"), "outcome": "ok", "done": None}
    watch.join()
    said = errors.decode(errors="replace").strip().splitlines()[-1:] or [""]
    if watch.timed_out:
        seen["outcome"] = f"failed: not ready after {timeout:g} s"
    elif group.memory and process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        seen["outcome"] = "killed"
    elif process.returncode:
        seen["outcome"] = f"failed: exit status: {process.returncode}, {said[0]}"
    else:
        try:
            seen["done"] = answer(out.decode(errors="replace"))
        except (ValueError, KeyError, IndexError) as error:
            seen["outcome"] = f"failed: its answer: {type(error).__name__} {error}"
    return seen


def answer_of_peer(out: str) -> dict:
    """The last line is a JSON object: the contract of peers/README.md."""
    return json.loads([line for line in out.splitlines() if line.startswith("{")][-1])


def answer_of_hobbit(out: str) -> dict:
    """The text, and behind it the JSON of --stats-json, which begins with a bracket alone."""
    at = out.rfind("\n{\n") + 1
    stats = json.loads(out[at:])
    timings, plan = stats["timings"], stats["plan"]
    ns = lambda key: int(1e6 * timings[key])
    return {"version": stats["hobbit"], "command": "", "load_ns": ns("load_ms"), "prompt_tokens": timings["prompt_tokens"],
            "prompt_ns": ns("prompt_ms"), "decode_tokens": timings["eval_runs"], "decode_ns": ns("eval_ms"), "text": out[:at],
            "budget": plan["budget"], "expert_cache": plan["expert_cache"]}


def record(name: str, runs: list[dict], reference: dict | None) -> dict:
    """The columns of one program's runs."""
    done = [one["done"] for one in runs if one["done"]]
    total = lambda key: sum(one[key] for one in done)
    speed = lambda part: 1e9 * total(f"{part}_tokens") / total(f"{part}_ns") if done and total(f"{part}_ns") else None
    samples = [one["prompt_ns"] + one["decode_ns"] for one in done]
    rates = [1e9 * (one["prompt_tokens"] + one["decode_tokens"]) / ns for one, ns in zip(done, samples)]
    wholes = [one["whole_ns"] for one in runs if one["done"]]
    step = max(1, len(runs[0]["series"]) // 300)
    peaks = [one["cgroup_peak"] for one in runs if one["cgroup_peak"]]
    columns = {
        "hobbit_engine": name,
        "hobbit_outcome": next((one["outcome"] for one in runs if one["outcome"] != "ok"), "ok"),
        "hobbit_prompt_ts": speed("prompt"), "hobbit_decode_ts": speed("decode"),
        "hobbit_peak_rss": max(one["peak_rss"] for one in runs), "hobbit_cgroup_peak": max(peaks, default=None),
        "hobbit_whole_ns": int(statistics.median(wholes)) if wholes else None, "hobbit_wholes_ns": wholes,
        "samples_ns": samples, "samples_ts": rates, "avg_ns": int(statistics.fmean(samples or [0])),
        "avg_ts": statistics.fmean(rates or [0]), "hobbit_prompt_ns": [one["prompt_ns"] for one in done],
        "hobbit_decode_ns": [one["decode_ns"] for one in done],
        "hobbit_steps_ns": [ns for one in done for ns in one.get("token_ns") or []],
        "hobbit_series": runs[0]["series"][::step],
    }
    if not done:
        return columns
    first = done[0]
    columns |= {
        "hobbit_engine_version": first["version"], "hobbit_flags": first["command"], "hobbit_generated": first["text"],
        "hobbit_load_ns": min(one["load_ns"] for one in done),
        "hobbit_first_token_ns": min(one["load_ns"] + one["prompt_ns"] for one in done),
        "hobbit_budget": first.get("budget"), "hobbit_expert_cache": first.get("expert_cache"),
    }
    threads = re.search(r"(?:^| )-t (\d+)", first["command"])
    if threads:
        columns["n_threads"] = int(threads[1])  # Peers that wait for page faults take more than asked for.
    if reference:
        # Some programs leave out the first blank.
        own, other = first["text"].lstrip(), reference["text"].strip()
        columns["hobbit_text_chars"] = len(other)
        columns["hobbit_text_equal"] = len(os.path.commonprefix([own, other]))
    return columns


def peers(args: argparse.Namespace) -> None:
    """Every program once in the order of the command line, and once in the reverse."""
    for limit in args.limit or [None]:
        about = json.loads(subprocess.check_output(
            [BIN / "hobbit-bench", "-m", args.model, *"-p 1 -n 0 -r 1 --no-warmup --no-roofline -o jsonl".split()]))
        keys = ("build_number", "build_commit", "model_filename", "model_type", "model_size", "model_n_params",
                "hobbit_machine", "hobbit_host", "hobbit_expert_bytes")
        common = {key: about[key] for key in keys} | {
            "test_time": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "backends": "CPU",
            "n_batch": 2048, "n_ubatch": args.ubatch_size, "n_threads": args.threads, "n_gen": args.predict,
            "hobbit_label": args.label, "hobbit_variant": args.variant, "hobbit_text": args.prompt_file.name,
            "hobbit_limit": limit, "hobbit_warm": args.warm}
        # A token is a byte at least, but for one that begins the text.
        context = -(-(args.prompt_file.stat().st_size + 1 + args.predict) // 256) * 256
        own = [BIN / "hobbit-cli", "-m", args.model, "-f", args.prompt_file, "-n", args.predict, "-t", args.threads,
               "-c", context, "-b", 2048, "-ub", args.ubatch_size, "--temp", 0, "--ignore-eos", "-no-cnv", "--no-warmup",
               "--no-display-prompt", "--cache-state", "off", "--stats-json", "-", *args.flags.split()]
        programs = {"hobbit": (own, answer_of_hobbit)}
        for name, peer in [("llama.cpp", args.baseline), *((peer.name, peer) for peer in args.peers)]:
            programs[name] = ([peer.resolve() / "run", "--model", args.model.resolve(), "--prompt-file", args.prompt_file,
                               "--predict", args.predict, "--threads", args.threads, "--context", context], answer_of_peer)
        runs: dict[str, list[dict]] = {name: [] for name in programs}
        for name in [*programs, *([] if args.once else reversed(programs))]:
            if any(one["outcome"] != "ok" for one in runs[name]):
                continue  # A program that was killed or failed once will be again.
            print(f"{args.model.name}, limit {limit}: {name}", file=sys.stderr)
            with Group(args.model, limit) as group:
                if args.warm:
                    run(group, programs[name][0], args.timeout, programs[name][1])
                runs[name].append(run(group, programs[name][0], args.timeout, programs[name][1]))
        reference = runs["llama.cpp"][0]["done"]
        done = [one["done"] for own in runs.values() for one in own if one["done"]]
        common["n_prompt"] = (reference or done[0])["prompt_tokens"] if done else 0
        for name, own in runs.items():
            print(json.dumps(common | record(name, own, reference)), flush=True)


def take_memory(most: int, file: Path) -> None:
    """Takes memory and gives it back, again and again, and reads a file through the page cache meanwhile. Lowest
    priority: it takes memory rather than time."""
    os.nice(19)
    with file.open("rb", buffering=0) as opened:
        while True:
            held = []
            while (len(held) + 1) << 24 <= most:
                held.append(bytearray(b"\1") * (1 << 24))
                if not opened.read(1 << 20):
                    opened.seek(0)
                time.sleep(0.02)


def bench(args: argparse.Namespace) -> None:
    """hobbit-bench inside limits of this program, its records completed with what limited it."""
    model = Path(args.words[args.words.index("-m") + 1])
    with Group(model, args.limit, args.disk_limit) as group:
        others = []
        try:
            for work in [lambda: take_memory(args.pressure, model)] * bool(args.pressure) + [None] * args.busy:
                others.append(os.fork())
                if not others[-1]:
                    if work:
                        group.enter()
                        work()
                    while True:
                        pass
            out = run(group, [BIN / "hobbit-bench", "-o", "jsonl", "--label", args.label, "--variant", args.variant,
                              *args.words], 1e6, str.splitlines)
            ended = [other for other in others if os.waitpid(other, os.WNOHANG) != (0, 0)]
        finally:
            for other in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
        if ended or not out["done"]:
            sys.exit("a process beside the run ended early" if ended else f"hobbit-bench {out['outcome']}")
        for line in out["done"]:
            one = json.loads(line) | {"hobbit_busy": args.busy, "hobbit_disk_limit": args.disk_limit}
            if args.limit:
                one |= {"hobbit_limit": args.limit, "hobbit_cgroup_peak": out["cgroup_peak"]}
                one["hobbit_outcome"] = "killed" if "SIGKILL" in one["hobbit_outcome"] else one["hobbit_outcome"]
            print(json.dumps(one), flush=True)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--label", default="peers")
    named.add_argument("--variant", default="")
    of_peers = commands.add_parser("peers", parents=[named])
    of_peers.add_argument("-m", "--model", type=Path, required=True)
    of_peers.add_argument("--prompt-file", type=Path, required=True)
    of_peers.add_argument("-n", "--predict", type=int, default=32)
    of_peers.add_argument("-t", "--threads", type=int, default=CORES)
    of_peers.add_argument("--limit", type=lambda text: [size(part) for part in text.split(",")])
    of_peers.add_argument("--ubatch-size", type=int, default=512)
    of_peers.add_argument("--flags", default="", help="hobbit-cli's further flags, in one word")
    of_peers.add_argument("--warm", action="store_true", help="every run follows an equal one in the same group")
    of_peers.add_argument("--once", action="store_true", help="not there and back")
    of_peers.add_argument("--timeout", type=float, default=1800)
    of_peers.add_argument("--baseline", type=Path, default=ROOT / "benches/peers/llama-cpp")
    of_peers.add_argument("peers", type=Path, nargs="*")
    of_peers.set_defaults(work=peers)
    of_bench = commands.add_parser("bench", parents=[named])
    of_bench.add_argument("--limit", type=size)
    of_bench.add_argument("--pressure", type=size)
    of_bench.add_argument("--disk-limit", type=int)
    of_bench.add_argument("--busy", type=int, default=0)
    of_bench.add_argument("words", nargs="+")
    of_bench.set_defaults(work=bench)
    of_machine = commands.add_parser("machine")
    of_machine.add_argument("path", type=Path)
    of_machine.set_defaults(work=lambda args: print(machine(args.path)))
    args = parser.parse_args()
    args.work(args)


if __name__ == "__main__":
    main()
