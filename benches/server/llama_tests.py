#!/usr/bin/env python3
"""llama.cpp's own server tests (tools/server/tests) against hobbit-server, with a model that is here.

    python3 -m venv venv && venv/bin/pip install -r requirements.txt
    venv/bin/python llama_tests.py --tests ~/llama.cpp/tools/server/tests --server ../../target/release/hobbit-server \\
        --model ../../models/demo.gguf --table table.md

The tests are those of the given directory: they are copied to a temporary one, run there and forgotten. What is
changed on the way:

* every server gets `--model` instead of a download (a test that needs another model is in not-applicable.txt);
* regular expressions on what tinyllamas would say are not checked, only that something is said, unless any model must
  say it (`keep` below: grammars and schemas force it);
* answers to pages of other origins are off here: their tests start the server with `--cors-origins '*'`;
* numbers and texts that are those of the tinyllamas' tokenizer are replaced by those of the demo model, from
  adaptations.txt. llama-server passes with the same replacements: `--server llama-server` shows it.

Exits with 1 when a test failed that is not in known-failures.txt.
"""

import argparse
import collections
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent

# Regular expressions on text that a grammar or a schema forces: they hold for any model.
KEEP = ['"42"', '"foooooo"', "a{5,5}", "<s>"]

# Tests that take for granted what is off here unless it is asked for, and the flags that ask.
ASK_FOR = [["test_security.py::test_cors_options*", ["--cors-origins", "*"]]]


def pairs(path: pathlib.Path) -> list[list[str]]:
    """Lines `pattern: reason` of a file; `#` starts a comment."""
    found = []
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, _, reason = line.partition(": ")
            found.append([pattern.strip(), reason.strip()])
    return found


def adaptations(path: pathlib.Path) -> list[tuple[str, str, str]]:
    """(file, old, new) of blocks `@ file` / `- old` / `+ new`; several `-` and `+` lines are one text of lines."""
    found, name, old, new = [], "", [], []

    def close() -> None:
        if old:
            found.append((name, "\n".join(old), "\n".join(new)))
        old.clear()
        new.clear()

    for line in path.read_text().splitlines():
        if line.startswith("@ "):
            close()
            name = line[2:].strip()
        elif line.startswith("- "):
            if new:
                close()
            old.append(line[2:])
        elif line.startswith("+ "):
            new.append(line[2:])
    close()
    return found


def prepare(tests: pathlib.Path, root: pathlib.Path, model: str) -> pathlib.Path:
    """A copy of the tests with the demo model's numbers. Its directory."""
    sources = tests.parents[2]
    copy = root / "tools" / "server" / "tests"
    shutil.copytree(tests, copy, ignore=shutil.ignore_patterns("tmp", "__pycache__", ".pytest_cache"))
    (root / "models").symlink_to(sources / "models")
    (copy / "tmp").mkdir(exist_ok=True)
    for name, old, new in adaptations(HERE / "adaptations.txt"):
        path = copy / "unit" / name
        text = path.read_text()
        if old not in text:
            print(f"adaptations.txt: {name} has no {old!r}: these tests are of another version", file=sys.stderr)
            continue
        path.write_text(text.replace(old, new))
    return copy


def infill_model(model: str, root: pathlib.Path) -> str:
    """A copy of the model whose vocabulary has tokens for filling in: three that it hardly uses."""
    path = root / "infill.gguf"
    tokens = [argument for kind, token in (("fim_pre", 300), ("fim_suf", 301), ("fim_mid", 302))
              for argument in ("--special-token-by-id", kind, str(token))]
    tool = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force", *tokens, model, str(path)]
    done = subprocess.run(tool, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"gguf_new_metadata failed (pip install gguf):\n{done.stderr[-2000:]}")
    return str(path)


def table(records: list[dict], known: list[list[str]], title: str) -> str:
    """Markdown: by file, then what failed and what does not apply."""
    by_file: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    reasons: dict[str, list[str]] = collections.defaultdict(list)
    failed = []
    for record in records:
        file = record["test"].split("::")[0]
        outcome = record["outcome"]
        if outcome == "skipped":
            by_file[file]["not applicable"] += 1
            reasons[record["message"].removeprefix("not applicable: ")].append(record["test"])
        else:
            by_file[file][outcome] += 1
            by_file[file]["text"] += bool(record["unchecked"])
            if outcome == "failed":
                failed.append(record)
    total: collections.Counter = collections.Counter()
    for counts in by_file.values():
        total.update(counts)
    applicable = total["passed"] + total["failed"]
    lines = [
        f"{title}: **{total['passed']} of {applicable}** applicable tests passed"
        f" ({100 * total['passed'] / max(1, applicable):.1f} %), {total['not applicable']} do not apply.",
        "",
        "| file | passed | failed | not applicable | of the run ones, with text not checked |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for file, counts in [*sorted(by_file.items()), ("all", total)]:
        columns = [file, *(counts[name] for name in ("passed", "failed", "not applicable", "text"))]
        lines.append("| " + " | ".join(map(str, columns)) + " |")
    if failed:
        lines += ["", "| failed | what came |", "| --- | --- |"]
        for record in failed:
            why = next((reason for pattern, reason in known if record["test"].startswith(pattern)), "")
            said = (why or record["message"].splitlines()[0] if record["message"] else why).replace("|", "\\|")[:200]
            lines.append(f"| `{record['test']}` | {said} |")
    lines += ["", "| tests that do not apply | why |", "| ---: | --- |"]
    for reason, tests in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        files = ", ".join(sorted({test.split("::")[0] for test in tests}))
        lines.append(f"| {len(tests)} | {reason} ({files}) |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Arguments, the run, the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=pathlib.Path, required=True, help="llama.cpp's tools/server/tests")
    parser.add_argument("--server", type=pathlib.Path, required=True, help="hobbit-server, or llama-server")
    parser.add_argument("--model", type=pathlib.Path, default=HERE / "../../models/demo.gguf")
    parser.add_argument("--extra", default="", help="arguments that every server gets besides")
    parser.add_argument("--table", type=pathlib.Path, help="where the table goes (default: standard output)")
    parser.add_argument("--records", type=pathlib.Path, help="where one JSON object per test goes")
    parser.add_argument("--title", default="hobbit-server")
    parser.add_argument("--timeout", type=int, default=120, help="seconds of one test")
    parser.add_argument("rest", nargs="*", help="for pytest, after --: -k NAME, unit/test_basic.py, -x")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llama-tests-") as directory:
        root = pathlib.Path(directory)
        copy = prepare(options.tests.resolve(), root, str(options.model))
        records = options.records.resolve() if options.records else root / "records.jsonl"
        records.unlink(missing_ok=True)
        settings = {
            "model": str(options.model.resolve()),
            "infill": infill_model(str(options.model.resolve()), root),
            "extra": [["*", options.extra.split()], *ASK_FOR],
            "skip": pairs(HERE / "not-applicable.txt"),
            "keep": KEEP,
            "records": str(records),
        }
        (root / "settings.json").write_text(json.dumps(settings))
        environment = {
            **os.environ,
            "HOBBIT_LLAMA_TESTS": str(root / "settings.json"),
            "LLAMA_SERVER_BIN_PATH": str(options.server.resolve()),
            "PYTHONPATH": f"{HERE}{os.pathsep}{copy}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "pytest",
                   "-p", "llama_tests_plugin", "-p", "no:cacheprovider", "-q", "--tb=short",
                   f"--timeout={options.timeout}", *options.rest]
        subprocess.run(command, cwd=copy, env=environment, stdout=subprocess.DEVNULL if options.table else None)
        found = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
    known = pairs(HERE / "known-failures.txt")
    text = table(found, known, options.title)
    if options.table:
        options.table.write_text(text)
        print(text.splitlines()[0])
    else:
        print(text)
    unknown = [record["test"] for record in found
               if record["outcome"] == "failed" and not any(record["test"].startswith(pattern) for pattern, _ in known)]
    for test in unknown:
        print(f"failed: {test}")
    sys.exit(1 if unknown or not found else 0)


if __name__ == "__main__":
    main()
