#!/usr/bin/env python3
"""Requests that nobody should send, for some minutes: mutated bodies for every endpoint, broken HTTP, path games.

    ./fuzz.py --minutes 10 --server 'hobbit-server -m demo.gguf -np 2 --slots --metrics'

The server is started here, with a directory for saved slots. A request fails the check when it is answered with a 5xx
other than 501 and 503, or not at all; when an error has no OpenAI-shaped body; when the process ends, panics or stops
answering /health; and when a file is read or written outside of the directory for slots. A failure prints the request,
which `--seed` repeats. Exits with 1 when there was one.
"""

import argparse
import asyncio
import collections
import copy
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time

from under_test import Client, Server

CHAT = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    "max_tokens": 3,
    "temperature": 0.5,
}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {
    "type": "object", "properties": {"a": {"type": "string", "enum": ["x", "y"]}}, "required": ["a"]}}}

# Bodies that are answered well: (method, path, body).
SEEDS = [
    ("POST", "/completion", {
        "prompt": "And God said", "n_predict": 3, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "seed": 1,
        "repeat_penalty": 1.1, "repeat_last_n": 16, "presence_penalty": 0.1, "frequency_penalty": 0.1, "mirostat": 0,
        "mirostat_tau": 5.0, "mirostat_eta": 0.1, "typical_p": 1.0, "dry_multiplier": 0.5, "dry_base": 1.75,
        "dry_allowed_length": 2, "dry_sequence_breakers": ["\n"], "xtc_probability": 0.1, "xtc_threshold": 0.1,
        "dynatemp_range": 0.1, "n_keep": 1, "n_discard": 1, "stop": ["END"], "stream": False, "n_probs": 2,
        "post_sampling_probs": False, "cache_prompt": True, "id_slot": -1, "ignore_eos": False, "return_tokens": True,
        "samplers": ["top_k", "temperature"], "response_fields": ["content"], "logit_bias": [[5, 1.0], ["the", False]],
        "timings_per_token": True, "return_progress": True, "t_max_predict_ms": 1000, "n_indent": 0, "min_keep": 0}),
    ("POST", "/completion", {"prompt": "And", "n_predict": 3, "stream": True, "n_probs": 1}),
    ("POST", "/completion", {"prompt": [1, 2, "text", 3], "n_predict": 2, "grammar": 'root ::= "a" | [b-z]+'}),
    ("POST", "/completion", {"prompt": ["a", [4, 5]], "n_predict": 2, "json_schema": {"type": "integer"}}),
    ("POST", "/completion", {"prompt": {"prompt_string": "a"}, "n_predict": 1, "lora": []}),
    ("POST", "/v1/completions", {"prompt": "And", "max_tokens": 3, "logprobs": 2, "n": 1, "echo": False, "stop": "x"}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("POST", "/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False}),
    ("POST", "/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "schema": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}},
                                "required": ["a"]}}}}),
    ("POST", "/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}, "logprobs": True,
                                              "top_logprobs": 2, "n": 2, "reasoning_effort": "low",
                                              "chat_template_kwargs": {"enable_thinking": True}}),
    ("POST", "/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
                                "instructions": "Be brief.", "max_output_tokens": 3, "tools": [], "stream": False}),
    ("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 3, "stream": True}),
    ("POST", "/v1/messages", {"model": "m", "max_tokens": 3, "system": [{"type": "text", "text": "s"}],
                               "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
                               "tools": [{"name": "f", "input_schema": TOOL["function"]["parameters"]}],
                               "tool_choice": {"type": "auto"}, "stop_sequences": ["x"], "thinking": {
                                   "type": "enabled", "budget_tokens": 8}, "metadata": {"user_id": "u"}}),
    ("POST", "/v1/messages", {"model": "m", "max_tokens": 3, "stream": True, "messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "x"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "b"}]}]}),
    ("POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("POST", "/v1/chat/completions/input_tokens", CHAT),
    ("POST", "/v1/responses/input_tokens", {"input": "a"}),
    ("POST", "/tokenize", {"content": "And God said", "add_special": True, "parse_special": True, "with_pieces": True}),
    ("POST", "/detokenize", {"tokens": [1, 2, 3]}),
    ("POST", "/apply-template", CHAT | {"add_generation_prompt": True}),
    ("POST", "/v1/embeddings", {"input": ["a", [1, 2]], "encoding_format": "float"}),
    ("POST", "/embedding", {"content": "a"}),
    ("POST", "/infill", {"input_prefix": "a", "input_suffix": "b", "prompt": "c", "n_predict": 2, "input_extra": [
        {"filename": "f", "text": "t"}]}),
    ("POST", "/v1/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1}),
    ("POST", "/slots/0?action=save", {"filename": "a.bin"}),
    ("POST", "/slots/0?action=restore", {"filename": "a.bin"}),
    ("POST", "/slots/1?action=erase", {}),
    ("POST", "/lora-adapters", [{"id": 0, "scale": 0.5}]),
    ("POST", "/props", {}),
    ("GET", "/health", None),
    ("GET", "/props", None),
    ("GET", "/slots", None),
    ("GET", "/metrics", None),
    ("GET", "/v1/models", None),
    ("GET", "/lora-adapters", None),
    ("GET", "/", None),
]

# What stands in for any value.
VALUES = [
    None, True, False, 0, -1, 1, 2, 3, -2, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53, 2**63, 2**64, -(2**63) - 1, 10**30,
    0.0, -0.0, 1e-45, 1e308, -1e308, 0.5, "", " ", "a", "0", "-1", "NaN", "\x00", "\ud83d", "\ufffd", "\u202e", "é" * 50,
    "a" * 5000, "../../etc/passwd", "{{ 1 / 0 }}", "{% for i in range(10**9) %}{% endfor %}", "<|endoftext|>", "root ::= root",
    [], [[]], {}, [None], [{}], {"": {}}, ["a", 1, None], [[[[[[[[]]]]]]]], {"type": "object"}, {"$ref": "#"},
    {"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/a"}}}, {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "minLength": 10**9}, {"type": "array", "minItems": 10**9}, {"enum": []}, {"anyOf": []},
    'root ::= "a"{1000000}', "root ::= (((((", 'root ::= [', "\\", "[1,2", "data:image/png;base64,AAAA", "http://127.0.0.1:1/",
]



def paths(value, at=()):
    """Where the values of a body are."""
    yield at
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*at, key))
    elif isinstance(value, list):
        for number in range(len(value)):
            yield from paths(value[number], (*at, number))


def mutated(body, rng: random.Random):
    """A body with one to four changes."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 1, 2, 2, 4])):
        at = rng.choice(list(paths(body)))
        if not at:
            if rng.random() < 0.1:
                body = copy.deepcopy(rng.choice(VALUES))
            continue
        holder = body
        for key in at[:-1]:
            holder = holder[key]
        act = rng.random()
        if act < 0.6:
            holder[at[-1]] = copy.deepcopy(rng.choice(VALUES))
        elif act < 0.75:
            del holder[at[-1]]
        elif act < 0.85 and isinstance(holder, dict):
            other = rng.choice([key for _, _, seed in SEEDS if isinstance(seed, dict) for key in seed])
            holder[other] = copy.deepcopy(rng.choice(VALUES))
        elif act < 0.95 and isinstance(holder[at[-1]], list):
            holder[at[-1]] = holder[at[-1]] * rng.choice([2, 10, 300])
        elif isinstance(holder[at[-1]], str):
            holder[at[-1]] = holder[at[-1]] * rng.choice([0, 2, 100])
        elif isinstance(holder[at[-1]], (int, float)):
            holder[at[-1]] = holder[at[-1]] * rng.choice([-1, 0, 10, 1000])
    return body


def written(body, rng: random.Random) -> bytes:
    """The bytes of a body, now and then damaged."""
    raw = json.dumps(body, allow_nan=True).encode()
    act = rng.random()
    if act < 0.80 or not raw:
        return raw
    if act < 0.85:
        return raw[: rng.randrange(len(raw))]
    if act < 0.92:
        damaged = bytearray(raw)
        for _ in range(rng.choice([1, 2, 8])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        return bytes(damaged)
    if act < 0.94:
        return raw.replace(b'"n_predict": 3', b'"n_predict": 3, "n_predict": 1e400', 1)
    if act < 0.96:
        depth = rng.choice([64, 1000, 200_000])
        return b'{"prompt":' + b"[" * depth + b"]" * depth + b"}"
    if act < 0.98:
        return raw + rng.choice([b"\x00", b"{}", b" " * 10_000, b"\xff\xfe"])
    return rng.choice([b"", b"null", b"NaN", b'"a"', b"[]", b"\xef\xbb\xbf{}", b"a=b&c=d"])


BROKEN = [
    b"GET\r\n\r\n", b"\x00\x01\x02\x03\r\n\r\n", b"POST /completion HTTP/1.1\r\nContent-Length: -5\r\n\r\n{}",
    b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    b"POST /completion HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /completion HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n", b"GET / HTTP/1.1\r\nA: " + b"b" * 1_000_000 + b"\r\n\r\n",
    b"GET /slots/%00 HTTP/1.1\r\nHost: a\r\n\r\n", b"GET //etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /../../../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", b"POST /completion HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
    b"Content-Length: 2\r\n\r\n{}",
    b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
]

# File names that a server may write to or read from only inside its directory, if at all.
NAMES = [
    "../outside.bin", "../../outside.bin", "/tmp/hobbit-fuzz-outside.bin", "a/../../outside.bin", "..", ".", "", "a\x00b.bin",
    "\x00", "..\\outside.bin", "a/b.bin", "~/outside.bin", "$HOME/outside.bin", "%2e%2e%2foutside.bin", "a" * 255, "a" * 256,
    "a" * 5000, " a.bin", "a.bin ", "a.", "con", "a:b", "a*b", "\u2215outside", "\uff0e\uff0e/outside", "\n.bin", "-rf", "|id",
    "link/inside.bin", "link", "dangling", "fifo", "directory",
]


class Fuzz:
    """What was sent, what came, what was wrong."""

    def __init__(self, server: Server, slots: pathlib.Path, seed: int):
        self.server = server
        self.client = Client(server)
        self.slots = slots
        self.seed = seed
        self.statuses: collections.Counter = collections.Counter()
        self.failures: list[str] = []
        self.sent = 0

    def fail(self, what: str, request: str) -> None:
        """One failure, printed at once."""
        self.failures.append(what)
        print(json.dumps({"failure": what, "request": request[:1500]}), flush=True)

    def judge(self, answer, request: str) -> None:
        """Whether an answer is one that a server may give."""
        self.statuses[answer.status] += 1
        if answer.status >= 500 and answer.status not in (501, 503):
            self.fail(f"{answer.status}: {answer.body[:300]!r}", request)
        elif answer.status >= 400 and request.startswith(("POST", "GET")):
            error = answer.error()
            if error is None or not isinstance(error.get("message"), str) or not error["message"]:
                self.fail(f"{answer.status} without an error object: {answer.body[:200]!r}", request)

    async def body(self, rng: random.Random) -> None:
        """A mutated body for some endpoint."""
        method, path, body = rng.choice(SEEDS)
        raw = None
        if body is not None:
            raw = written(mutated(body, rng), rng)
        if rng.random() < 0.03:
            method = rng.choice(["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
        request = f"{method} {path} {raw!r}"
        if method == "HEAD":
            return
        try:
            self.judge(await self.client.request(method, path, raw, timeout=120), request)
        except TimeoutError:
            self.fail("no answer in 120 s", request)
        except (OSError, asyncio.IncompleteReadError, ValueError) as failure:
            self.fail(f"{type(failure).__name__}: {failure}", request)

    async def broken(self, rng: random.Random) -> None:
        """Bytes that are hardly HTTP: the connection may be closed, the server must live."""
        raw = rng.choice(BROKEN)
        try:
            reader, writer = await self.client.connect()
            writer.write(raw)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(1 << 16), 20)
            if b"root:" in answer:
                self.fail("a file of the system came back", repr(raw[:200]))
            if answer.startswith(b"HTTP/1.1 5") and not answer.startswith((b"HTTP/1.1 501", b"HTTP/1.1 503", b"HTTP/1.1 505")):
                self.fail(f"{answer[:40]!r}", repr(raw[:200]))
            writer.close()
        except TimeoutError:
            pass  # Waiting for the rest of a body is what a server does.
        except OSError:
            pass

    async def names(self) -> None:
        """Names of files for slots: none may lead out of the directory."""
        outside = self.slots.parent / "outside"
        outside.mkdir()
        (outside / "inside.bin").write_bytes(b"secret")
        (self.slots / "link").symlink_to(outside)
        (self.slots / "dangling").symlink_to(self.slots.parent / "made-through-a-link.bin")
        (self.slots / "directory").mkdir()
        os.mkfifo(self.slots / "fifo")
        await self.client.post("/completion", {"prompt": "And God said", "n_predict": 4, "id_slot": 0})
        before = tree(self.slots.parent, self.slots)
        for name in NAMES:
            for action in ("save", "restore"):
                request = f"POST /slots/0?action={action} {name!r}"
                try:
                    answer = await self.client.post(f"/slots/0?action={action}", {"filename": name}, timeout=10)
                    self.judge(answer, request)
                except TimeoutError:
                    self.fail("no answer in 10 s", request)
                except (OSError, asyncio.IncompleteReadError, ValueError) as failure:
                    self.fail(f"{type(failure).__name__}: {failure}", request)
        after = tree(self.slots.parent, self.slots)
        for path in sorted(set(after.items()) ^ set(before.items())):
            self.fail(f"a file outside of the slots' directory was made or changed: {path[0]}", "slots")
        for path in ("/tmp/hobbit-fuzz-outside.bin",):
            if os.path.exists(path):
                self.fail(f"{path} was written", "slots")
        for number in ("-1", "99", "1e3", "%00", "..", "0/../1", "999999999999999999999", "a"):
            answer = await self.client.post(f"/slots/{number}?action=save", {"filename": "a.bin"})
            self.judge(answer, f"POST /slots/{number}?action=save")
            if answer.status == 200:
                self.fail("a slot that does not exist was saved", f"POST /slots/{number}?action=save")

    async def run(self, minutes: float, clients: int) -> bool:
        """Path games, then mutations until the time is over."""
        await self.names()
        end = time.monotonic() + 60 * minutes
        shown = time.monotonic()
        memory = self.server.resident_kib()

        async def worker() -> None:
            nonlocal shown
            while time.monotonic() < end and self.server.alive() and len(self.failures) < 200:
                self.sent += 1
                rng = random.Random(self.seed * 1_000_003 + self.sent)
                await (self.broken(rng) if rng.random() < 0.05 else self.body(rng))
                if time.monotonic() - shown > 30:
                    shown = time.monotonic()
                    try:
                        health = await self.client.request("GET", "/health", timeout=30)
                        if health.status != 200:
                            self.fail(f"/health says {health.status}", "")
                    except (OSError, TimeoutError) as failure:
                        self.fail(f"/health: {type(failure).__name__} {failure}", "")
                        continue
                    print(json.dumps({"sent": self.sent, "statuses": dict(sorted(self.statuses.items())),
                                      "rss_anon_kib": self.server.resident_kib(), "failures": len(self.failures)}), flush=True)

        await asyncio.gather(*(worker() for _ in range(clients)))
        alive = self.server.alive()
        if not alive:
            self.fail(f"the server ended with {self.server.process.returncode}", "")
        else:
            answer = await self.client.post("/completion", {"prompt": "And God said", "n_predict": 4})
            if answer.status != 200:
                self.fail(f"afterwards a good request is answered with {answer.status}", "")
        for line in self.server.panics():
            self.fail(f"log: {line}", "")
        print(json.dumps({
            "minutes": minutes, "sent": self.sent, "seed": self.seed, "statuses": dict(sorted(self.statuses.items())),
            "rss_anon_kib_start": memory, "rss_anon_kib_end": self.server.resident_kib() if alive else None,
            "alive": alive, "failures": len(self.failures),
        }), flush=True)
        return not self.failures


def tree(root: pathlib.Path, but: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file below `root` that is not below `but`."""
    found = {}
    for path in root.rglob("*"):
        if but not in path.parents and path != but and not path.name.endswith(".log"):
            status = path.lstat()
            found[str(path)] = (status.st_size, 0 if path.is_dir() else status.st_mtime_ns)
    return found


def main() -> None:
    """Arguments, the server, the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="command of the server, without --host, --port, --slot-save-path")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--address-space-gib", type=int, default=8, help="what the server may map at most")
    parser.add_argument("--log", help="the server's output")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # The server is ended too.
    with tempfile.TemporaryDirectory(prefix="hobbit-fuzz-") as directory:
        slots = pathlib.Path(directory) / "root" / "slots"
        slots.mkdir(parents=True)
        log = options.log or os.path.join(directory, "server.log")
        server = Server(f"{options.server} --slot-save-path {slots}/", log, address_space=options.address_space_gib << 30)
        try:
            server.wait_ready()
            good = asyncio.run(Fuzz(server, slots, options.seed).run(options.minutes, options.clients))
        finally:
            if server.alive():
                code, seconds = server.terminate()
                print(json.dumps({"exit_code": code, "seconds_to_stop": round(seconds, 2)}))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
