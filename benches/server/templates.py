#!/usr/bin/env python3
"""Chat templates of many models against hobbit-server: does each keep what a request asks for?

    ./templates.py --server target/release/hobbit-server --model models/demo.gguf [--popular | --only NAME] [--jobs 2]

The templates come from the source package of `llama-cpp-python`, which pip fetches to target/templates; --templates
names a directory of others. In the first columns the model's words do not matter: with a constraint, its answer follows
the constraint. Then a model says word by word what the template writes for an assistant's message (replay.py): the
answer must be that message, whole and in a stream.
Prints a line for each template and a column for each kind of request: `ok`, `-` for a request that is refused by name
with status 400, `?` for an answer that was cut too early to judge, `note` for a loss that the server announces at its
start and in /props, `kept` for an answer by a schema in another form than the template's, `.` where the template
writes no such message, `known` for a defect of llama.cpp that KNOWN names, and `FAIL`. Exits with 1 if a constraint or
a message was dropped in silence.
"""

import argparse
import concurrent.futures
import contextlib
import pathlib
import shlex
import subprocess
import sys
import tarfile
import tempfile

import replay
import under_test
from template_cells import Cells, Failed, Noted, Refused, Replays, Unwritten, parts

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "llama-cpp-python==0.3.36"
POPULAR = [
    "Qwen-Qwen3-0.6B", "Qwen3-Coder", "openai-gpt-oss-120b", "deepseek-ai-DeepSeek-V3.2", "GLM-4.6",
    "Kimi-K2-Instruct", "Mistral-Small-3.2-24B-Instruct-2506", "meta-llama-Llama-3.3-70B-Instruct",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "MiniMax-M2",
]

# Cells in which llama.cpp's parsers and grammars differ from the template.
KNOWN = {
    ("MiniMax-M1", "pair"): "its grammar has a comma between calls, the template a line break",
    ("meetkai-functionary-medium-v3.2", "pair"): "its grammar has no >>> between calls",
    ("meetkai-functionary-medium-v3.2", "said"): "its grammar has no >>> in front of a call",
    **{("upstage-Solar-Open-100B", column): "its grammar allows only one id of calls, call00001"
       for column in ("call", "forced", "pair", "beside")},
}

COLUMNS = Cells.COLUMNS + Replays.COLUMNS


def row(options, path):
    """The cells of a template, and the reasons of those that are not ok."""
    try:
        with running(options, path, options.model) as server:
            requests = Cells(*server)
            cells, reasons = measured(requests, path.stem)
            written = requests.texts()
        texts = replay.Texts({name: parts(name, text) for name, text in written.items()})
        with tempfile.NamedTemporaryFile(suffix=".gguf") as model:
            texts.write(pathlib.Path(model.name))
            with running(options, path, model.name) as server:
                more, others = measured(Replays(*server, texts, written), path.stem)
        return cells + more, reasons | others
    except under_test.NotReady as failure:
        return ["FAIL"] * len(COLUMNS), {"start": str(failure)}


@contextlib.contextmanager
def running(options, path, model):
    """A server, as its URL and the notes of its log."""
    command = shlex.join([options.server, "-m", model, "-t", "1", "-c", "16384", "-np", "1", "--no-prefill-assistant",
                          "--chat-template-file", str(path)])
    with tempfile.NamedTemporaryFile() as log:
        server = under_test.Server(command, log.name)
        try:
            server.wait_ready()
            yield server.url, [line for line in log.read().decode().splitlines() if "note: " in line]
        except under_test.NotReady as failure:
            raise under_test.NotReady(f"{failure}: {log.read().decode()[-300:]}") from None
        finally:
            server.terminate()


def measured(requests, template):
    cells, reasons = [], {}
    for column in requests.COLUMNS:
        try:
            cell = getattr(requests, column)()
        except Refused as refusal:
            cell, reasons[column] = "-", str(refusal)
        except Unwritten as reason:
            cell, reasons[column] = ".", str(reason)
        except Noted as reason:
            cell, reasons[column] = "note", str(reason)
        except (Failed, OSError, KeyError) as failure:
            cell, reasons[column] = "FAIL", repr(failure)
            if (template, column) in KNOWN:
                cell, reasons[column] = "known", KNOWN[template, column]
        cells.append(cell)
    return cells, reasons


def templates():
    """The package's templates, fetched once."""
    folder = ROOT / "target/templates"
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("*.jinja")):
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary",
                        "llama-cpp-python", PACKAGE, "-d", str(folder)], check=True)
        for package in folder.glob("*.tar.gz"):
            with tarfile.open(package) as files:
                for member in files:
                    if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                        (folder / pathlib.Path(member.name).name).write_bytes(files.extractfile(member).read())
            package.unlink()
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--model", default=str(ROOT / "models/demo.gguf"))
    parser.add_argument("--templates", type=pathlib.Path, help="directory of .jinja files")
    parser.add_argument("--popular", action="store_true", help="ten families that people use most")
    parser.add_argument("--only", help="templates with this in their name")
    parser.add_argument("--reasons", action="store_true", help="say why cells are refused or fail")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    paths = sorted((options.templates or templates()).glob("*.jinja"))
    if options.popular:
        paths = [path for path in paths if path.stem in POPULAR]
    paths = [path for path in paths if not options.only or options.only in path.stem]
    if not paths or (options.popular and len(paths) < len(POPULAR)):
        raise SystemExit("templates are missing")
    print(f"{'':44}" + " ".join(f"{column:8}" for column in COLUMNS))
    counts = {}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for path, (cells, reasons) in zip(paths, pool.map(lambda path: row(options, path), paths)):
            print(f"{path.stem[:43]:44}" + " ".join(f"{cell:8}" for cell in cells), flush=True)
            for cell in cells:
                counts[cell] = counts.get(cell, 0) + 1
            for column, reason in reasons.items():
                if options.reasons or "FAIL" in cells:
                    print(f"    {column}: {reason[:300]}")
    print(f"{len(paths)} templates: " + ", ".join(f"{n} {cell}" for cell, n in sorted(counts.items())))
    sys.exit(1 if counts.get("FAIL") else 0)


if __name__ == "__main__":
    main()
