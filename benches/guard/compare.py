#!/usr/bin/env python3
"""Compares gungraun's counts (JSON lines on stdin) with instructions.json, or records them. check.sh calls it."""

import argparse
import json
import platform
import subprocess
import sys
import unittest

# Features of the processor that change how hobbit is compiled, and differ between machines of a kind.
CPU_FEATURES = ["sse4.2", "avx2", "fma", "bmi2", "f16c", "avx512f", "neon"]


def parse(output: str) -> dict[str, int]:
    """Instructions by `group::function id`."""
    counts: dict[str, int] = {}
    for line in filter(str.strip, output.splitlines()):
        bench = json.loads(line)
        name = f"{bench['group']}::{bench['function_name']}" + (f" {bench['id']}" if bench.get("id") else "")
        if name in counts:
            raise ValueError(f"{name} was counted twice")
        counts[name] = int(bench["profiles"][0]["data"]["total"]["metrics"]["Ir"]["values"]["new"])
    if not counts:
        raise ValueError("gungraun counted nothing")
    return counts


def verdict(recorded: int | None, found: int | None, margin: float) -> str:
    """Empty if the count is within the margin. Only `fewer` passes as well."""
    if found is None:
        return "recorded, but no longer counted: --record if that is meant"
    if recorded is None:
        return "never recorded: --record"
    allowed, change = recorded * margin / 100, found - recorded
    if change > allowed:
        return "more than the margin allows"
    return "fewer: record it (--record)" if change < -allowed else ""


def first_line(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()


def tools() -> dict[str, str]:
    """Counts depend on these beside hobbit's code."""
    flags = ["-C", "target-cpu=x86-64-v3"] if platform.machine() == "x86_64" else []  # as .cargo/config.toml has them
    cfg = subprocess.run(["rustc", "--print", "cfg", *flags], check=True, capture_output=True, text=True).stdout
    return {
        "compiler": first_line("rustc", "--version"),
        "target": f"{platform.machine()} {platform.system().lower()}",
        "cpu_features": " ".join(name for name in CPU_FEATURES if f'target_feature="{name}"' in cfg),
        "valgrind": first_line("valgrind", "--version"),
        "libc": first_line("getconf", "GNU_LIBC_VERSION"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the counts in place of the recorded ones")
    parser.add_argument("--margin", type=float, default=3.0, help="change that passes, in percent [default: 3]")
    parser.add_argument("--file", default="instructions.json", help="the recording")
    args = parser.parse_args()
    counts, here = parse(sys.stdin.read()), tools()
    if args.record:
        with open(args.file, "w", encoding="utf-8") as file:
            json.dump({"recorded_with": here, "instructions": dict(sorted(counts.items()))}, file, indent=2)
            file.write("\n")
        print(f"{args.file}: {len(counts)} benches recorded")
        return 0
    with open(args.file, encoding="utf-8") as file:
        record = json.load(file)
    recorded, n_fewer, failed = record["instructions"], 0, []
    print(f"{'instructions':<34} {'recorded':>10} {'found':>10} {'change':>10}")
    for name in sorted(recorded.keys() | counts.keys()):
        old, new = recorded.get(name), counts.get(name)
        change = f"{100 * (new - old) / max(old, 1):+.2f} %" if old is not None and new is not None else "-"
        words = verdict(old, new, args.margin)
        line = f"{name:<34} {old or '-':>10} {new or '-':>10} {change:>10}  {words}".rstrip()
        print(line)
        n_fewer += words.startswith("fewer")
        if words and not words.startswith("fewer"):
            failed.append(line)
    for what, value in record["recorded_with"].items():
        if value != here[what]:
            print(f"note: {what}: recorded with {value}, this is {here[what]}; counts may differ for that alone")
    if n_fewer:
        print(f"{n_fewer} benches improved by more than {args.margin} %: benches/guard/check.sh --record keeps them so")
    if failed:
        print(f"{len(failed)} benches failed (margin {args.margin} %):", *failed, sep="\n", file=sys.stderr)
        print("a slower path is a bug unless the change needs it: then record it with --record", file=sys.stderr)
        return 1
    return 0


class Tests(unittest.TestCase):
    """python3 -m unittest compare"""

    def test_margin(self) -> None:
        words = [verdict(1000, found, 5)[:5] for found in (949, 950, 1000, 1050, 1051)]
        self.assertEqual(words, ["fewer", "", "", "", "more "])
        self.assertTrue(verdict(None, 1, 5) and verdict(1, None, 5))

    def test_lines(self) -> None:
        line = '{"function_name":"decide","group":"eviction","id":"lru","profiles":[{"data":{"total":{"metrics":%s}}}]}'
        counted = line % '{"Ir":{"values":{"new":40151,"old":7}}}'
        self.assertEqual(parse(counted + "\n\n"), {"eviction::decide lru": 40151})
        for bad in ("\n", f"{counted}\n{counted}", "Gungraun result: Ok", line % '{"Dr":{}}'):
            self.assertRaises((ValueError, KeyError), parse, bad)


if __name__ == "__main__":
    sys.exit(main())
