#!/usr/bin/env python3
"""Chat templates of many models against hobbit-server: does each keep what a request asks for?

    ./templates.py --server target/release/hobbit-server --model models/demo.gguf [--popular | --only NAME] [--jobs 2]

The templates come from the source package of `llama-cpp-python`, which pip fetches to target/templates; --templates
names a directory of others. The model's words do not matter: with a constraint, its answer follows the constraint.
Prints a line for each template and a column for each kind of request: `ok`, `-` for a request that is refused by name
with status 400, `?` for an answer that was cut before it showed anything, and `FAIL`. Exits with 1 if a constraint or a
message was dropped in silence.
"""

import argparse
import concurrent.futures
import json
import pathlib
import shlex
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request

import under_test

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "llama-cpp-python==0.3.36"
POPULAR = [
    "Qwen-Qwen3-0.6B", "Qwen3-Coder", "openai-gpt-oss-120b", "deepseek-ai-DeepSeek-V3.2", "GLM-4.6",
    "Kimi-K2-Instruct", "Mistral-Small-3.2-24B-Instruct-2506", "meta-llama-Llama-3.3-70B-Instruct",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "MiniMax-M2",
]

SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"],
          "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "paint_wall", "description": "Paints a wall", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colour", "schema": SCHEMA}}
HELLO = "the quick brown fox"
ASK = [{"role": "user", "content": HELLO}]


class Refused(Exception):
    """The server answered with 400."""


class Failed(Exception):
    """Something was dropped in silence, or the server failed."""


def calls(arguments):
    """A conversation with a call and its result."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "paint_wall", "arguments": arguments}}
    return ASK + [{"role": "assistant", "content": "", "tool_calls": [call]},
                  {"role": "tool", "tool_call_id": "abcdefghi", "name": "paint_wall", "content": "it is wet"},
                  {"role": "user", "content": "and now"}]


class Cells:
    """The kinds of requests, in the order of the columns. Each returns `ok` or `?`, or raises."""

    def __init__(self, url):
        self.url = url

    def post(self, path, body):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            if error.code == 400:
                raise Refused(json.loads(text)["error"]["message"]) from None
            raise Failed(f"status {error.code}: {text}") from None

    def rendered(self, *expected, **body):
        """Requires texts in the prompt."""
        prompt = self.post("/apply-template", body)["prompt"]
        for text in expected:
            if text not in prompt:
                raise Failed(f"'{text}' is not in the prompt")

    def choice(self, n, **body):
        fixed = {"messages": ASK, "temperature": 0, "max_tokens": n, "reasoning_budget_tokens": 4}
        answer = self.post("/v1/chat/completions", fixed | body)
        return answer["choices"][0], answer

    def answered(self, **body):
        """Requires a call of the tool where there are tools, or an answer by the schema. An answer that is cut before
        either needs a grammar that is in force: reasoning, and text before a call, are free."""
        choice, answer = self.choice(300, verbose=True, **body)
        message = choice["message"]
        if message.get("tool_calls"):
            self.of_schema(message["tool_calls"][0]["function"]["arguments"])
            return "ok"
        if choice["finish_reason"] == "length":
            settings = answer["__verbose"]["generation_settings"]
            if settings["grammar"] and not settings["grammar_lazy"]:
                return "?"
        elif "response_format" in body:
            self.of_schema(message["content"])
            return "ok"
        raise Failed(f"{choice['finish_reason']}: {message['content'][:100]!r}")

    def of_schema(self, text):
        try:
            value = json.loads(text.strip().removeprefix("```json").removesuffix("```"))
        except ValueError:
            raise Failed(f"not JSON: {text[:100]!r}") from None
        if not isinstance(value, dict) or set(value) != {"colour"} or value["colour"] not in ("red", "blue"):
            raise Failed(f"not by the schema: {text[:100]!r}")

    def plain(self):
        self.rendered(HELLO, messages=ASK)
        self.choice(4)
        return "ok"

    def tools(self):
        self.rendered(HELLO, "paint_wall", messages=ASK, tools=[TOOL])
        self.choice(4, tools=[TOOL])
        return "ok"

    def required(self):
        return self.answered(tools=[TOOL], tool_choice="required")

    def parallel(self):
        self.choice(4, tools=[TOOL], parallel_tool_calls=True)
        choice, _ = self.choice(200, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        if len(choice["message"].get("tool_calls", [])) > 1:
            raise Failed("two calls where one is allowed")
        return "ok"

    def schema(self):
        return self.answered(response_format=FORMAT)

    def both(self):
        return self.answered(response_format=FORMAT, tools=[TOOL])

    def no_think(self):
        self.rendered(HELLO, messages=ASK, chat_template_kwargs={"enable_thinking": False})
        self.choice(4, chat_template_kwargs={"enable_thinking": False})
        return "ok"

    def history(self):
        self.rendered(HELLO, "paint_wall", "red", "it is wet", messages=calls('{"colour": "red"}'), tools=[TOOL])
        return "ok"

    def lists(self):
        parts = [{"type": "text", "text": HELLO}, {"type": "text", "text": "jumps"}]
        self.rendered(HELLO, "jumps", messages=[{"role": "user", "content": parts}])
        messages = calls('{"colour": "red"}')
        messages[2]["content"] = [{"type": "text", "text": "it is wet"}]
        self.rendered("it is wet", messages=messages, tools=[TOOL])
        return "ok"

    def empty(self):
        try:
            self.rendered("it is wet", messages=calls(""), tools=[TOOL])
        except Refused as refusal:
            if "arguments" in str(refusal):
                raise Failed(str(refusal)) from None
            raise
        return "ok"

    def systems(self):
        twice = [{"role": "system", "content": "be brief"}, {"role": "system", "content": "be kind"}]
        self.rendered("be brief", "be kind", HELLO, messages=twice + ASK)
        return "ok"


COLUMNS = ["plain", "tools", "required", "parallel", "schema", "both", "no_think", "history", "lists", "empty",
           "systems"]


def row(options, path):
    """The cells of a template, and the reasons of those that are not ok."""
    command = shlex.join([options.server, "-m", options.model, "-t", "1", "-c", "4096", "-np", "1",
                          "--chat-template-file", str(path)])
    with tempfile.NamedTemporaryFile() as log:
        server = under_test.Server(command, log.name)
        try:
            server.wait_ready()
            return measured(Cells(server.url))
        except under_test.NotReady as failure:
            return ["FAIL"] * len(COLUMNS), {"start": f"{failure}: {log.read().decode()[-300:]}"}
        finally:
            server.terminate()


def measured(requests):
    cells, reasons = [], {}
    for column in COLUMNS:
        try:
            cell = getattr(requests, column)()
        except Refused as refusal:
            cell, reasons[column] = "-", str(refusal)
        except (Failed, OSError, KeyError) as failure:
            cell, reasons[column] = "FAIL", repr(failure)
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
                    print(f"    {column}: {reason[:200]}")
    print(f"{len(paths)} templates: " + ", ".join(f"{n} {cell}" for cell, n in sorted(counts.items())))
    sys.exit(1 if counts.get("FAIL") else 0)


if __name__ == "__main__":
    main()
