#!/usr/bin/env python3
"""Clients with every kind of request for a long time, while caches are resized and the disk is slow.

    ./soak.py --server hobbit-server --minutes 60 --text ../../models/demo-heldout-prose.txt
    ./soak.py --server hobbit-server --model large.gguf --flags '--mem-budget 8GiB' --disk-mib 100 --text …

Eight clients chat, complete, stream, cancel, tokenise, read metrics, save and restore slots; SIGUSR1 and SIGUSR2 halve
the caches and restore them. With `--disk-mib` a control group slows reads down (root). With `--embeddings` the server
serves embeddings alone. A line of figures is printed at each tenth of the time. Exits with 1 when a request fails, a
stream does not end in order, memory grows, or a slot is lost.
"""

import argparse
import asyncio
import collections
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time

from load import passages, say
from under_test import Client, Refused, Server

# How often each kind of request is asked, of a hundred.
KINDS = {
    "completion": 10,
    "completion stream": 14,
    "chat": 8,
    "chat stream": 14,
    "responses stream": 8,
    "messages stream": 8,
    "cancelled": 14,
    "schema": 4,
    "tokenise": 5,
    "template": 3,
    "count": 2,
    "look": 6,
    "save": 2,
    "restore": 2,
}


class Soak:
    """The clients, what they count, and the checks."""

    def __init__(self, options, server: Server):
        self.options = options
        self.server = server
        self.client = Client(server)
        self.prompts = passages(options.text.read_text(), 64, 24, options.seed)
        self.counts: collections.Counter = collections.Counter()
        self.failures: collections.Counter = collections.Counter()
        self.resizes = self.events = 0
        self.worst_gap = 0.0
        self.start = self.end = 0.0
        self.read_before = 0

    def fail(self, message: str) -> None:
        """One failure; the same one is printed once."""
        if not self.failures[message]:
            say(failure=message)
        self.failures[message] += 1

    async def ask(self, kind: str, path: str, body, method: str = "POST", allowed: tuple[int, ...] = (200,)):
        """A request without a stream."""
        raw = None if body is None else json.dumps(body).encode()
        answer = await self.client.request(method, path, raw, self.options.patience)
        if answer.status not in allowed:
            self.fail(f"{kind}: {answer.status} {answer.body[:160]!r}")
        return answer

    async def stream(self, kind: str, path: str, body, last) -> None:
        """A stream, whose last event must be one that `last` accepts, or an error's; nothing may follow it."""
        before, final = None, None
        async with asyncio.timeout(self.options.patience):
            async for at, data in self.client.events(path, body | {"stream": True}):
                if final is not None:
                    self.fail(f"{kind}: an event after the last one")
                if before is not None:
                    self.worst_gap = max(self.worst_gap, at - before)
                before = at
                self.events += 1
                event = None if data == "[DONE]" else json.loads(data)
                if event is None or (isinstance(event, dict) and ("error" in event or last(event))):
                    final = data
                    if isinstance(event, dict) and event.get("error"):
                        self.fail(f"{kind}: {data[:160]}")
        if final is None:
            self.fail(f"{kind}: the stream ended without a last event")

    async def one(self, kind: str, rng: random.Random) -> None:
        """One request of a kind."""
        prompt, n = rng.choice(self.prompts), rng.choice([4, 16, 48])
        messages = [{"role": "user", "content": prompt}]
        whole = {
            "prompt": prompt,
            "n_predict": n,
            "temperature": rng.choice([0.0, 0.8]),
            "cache_prompt": rng.random() < 0.5,
        }
        if kind == "completion":
            await self.ask(kind, "/completion", whole)
        elif kind == "completion stream":
            await self.stream(kind, "/completion", whole, lambda event: event.get("stop") is True)
        elif kind == "chat":
            await self.ask(kind, "/v1/chat/completions", {"messages": messages, "max_tokens": n})
        elif kind == "chat stream":
            await self.stream(
                kind, "/v1/chat/completions", {"messages": messages, "max_tokens": n}, lambda event: False
            )
        elif kind == "responses stream":
            ends = {"response.completed", "response.incomplete", "response.failed"}
            await self.stream(
                kind,
                "/v1/responses",
                {"input": prompt, "max_output_tokens": n},
                lambda event: event.get("type") in ends,
            )
        elif kind == "messages stream":
            await self.stream(
                kind,
                "/v1/messages",
                {"messages": messages, "max_tokens": n, "model": "m"},
                lambda event: event.get("type") == "message_stop",
            )
        elif kind == "cancelled":
            try:
                async with asyncio.timeout(rng.uniform(0.0, 1.0)):
                    async for _ in self.client.events(
                        "/completion", whole | {"n_predict": 400, "ignore_eos": True, "stream": True}
                    ):
                        pass
            except TimeoutError:
                pass
        elif kind == "schema":
            schema = {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
                "required": ["a", "b"],
            }
            await self.ask(kind, "/completion", whole | {"json_schema": schema})
        elif kind == "tokenise":
            tokens = (await self.ask(kind, "/tokenize", {"content": prompt})).json()["tokens"]
            if (await self.ask(kind, "/detokenize", {"tokens": tokens})).json()["content"] != prompt:
                self.fail("tokenise: the text does not come back")
        elif kind == "template":
            await self.ask(kind, "/apply-template", {"messages": messages})
        elif kind == "count":
            await self.ask(kind, "/v1/messages/count_tokens", {"messages": messages})
        elif kind == "look":
            await self.ask(
                kind, rng.choice(["/health", "/metrics", "/slots", "/props", "/experts", "/v1/models"]), None, "GET"
            )
        elif kind == "save":
            await self.ask(kind, f"/slots/{rng.randrange(4)}?action=save", {"filename": f"{rng.randrange(4)}.bin"})
        elif kind == "restore":
            # 400: nothing was saved under this name yet.
            await self.ask(
                kind,
                f"/slots/{rng.randrange(4)}?action=restore",
                {"filename": f"{rng.randrange(4)}.bin"},
                allowed=(200, 400),
            )
        elif kind == "embedding":
            await self.ask(kind, "/v1/embeddings", {"input": [prompt] * rng.choice([1, 4])})

    async def worker(self, number: int) -> None:
        """One client until the end."""
        rng = random.Random(self.options.seed * 1_000 + number)
        kinds = {"embedding": 94, "look": 6} if self.options.embeddings else KINDS
        while time.monotonic() < self.end and self.server.alive():
            (kind,) = rng.choices(list(kinds), kinds.values())
            try:
                await self.one(kind, rng)
            except Refused as refusal:
                self.fail(f"{kind}: {refusal}")
            except TimeoutError:
                self.fail(f"{kind}: not done in {self.options.patience:.0f} s")
            except (OSError, ValueError, KeyError, asyncio.IncompleteReadError) as failure:
                self.fail(f"{kind}: {type(failure).__name__} {failure}")
            self.counts[kind] += 1

    async def resize(self) -> None:
        """Halves the caches and gives them back, in turn."""
        while time.monotonic() < self.end:
            await asyncio.sleep(self.options.resize)
            if self.server.alive():
                self.server.process.send_signal(signal.SIGUSR2 if self.resizes % 2 else signal.SIGUSR1)
                self.resizes += 1

    def read_mib_per_s(self) -> float:
        """Mean rate since the first request. The load of the model, before it, is not counted."""
        read = self.server.read_bytes() - self.read_before
        return round(read / (1 << 20) / (time.monotonic() - self.start), 2)

    async def watch(self, figures: list[int]) -> None:
        """A line at each tenth of the time."""
        length = 60 * self.options.minutes
        for tenth in range(1, 11):
            await asyncio.sleep(max(0.0, self.start + tenth * length / 10 - time.monotonic()))
            if not self.server.alive():
                return
            figures.append(self.server.resident_kib())
            say(
                tenth=tenth,
                requests=self.counts.total(),
                rss_anon_mib=figures[-1] >> 10,
                peak_mib=self.server.peak_kib() >> 10,
                open_files=self.server.open_files(),
                resizes=self.resizes,
                events=self.events,
                read_mib_per_s=self.read_mib_per_s(),
                worst_gap_ms=round(1e3 * self.worst_gap, 1),
                failures=self.failures.total(),
            )

    async def all_slots(self) -> None:
        """Every slot comes free and answers."""
        end, busy = time.monotonic() + 60, None
        while busy != 0 and time.monotonic() < end:
            slots = (await self.client.request("GET", "/slots", timeout=10)).json()
            busy = sum(slot["is_processing"] for slot in slots)
            await asyncio.sleep(0.2)
        if busy:
            self.fail(f"{busy} slots are busy a minute after the last request")
        for slot in slots:
            await self.ask(
                "afterwards", "/completion", {"prompt": self.prompts[0], "n_predict": 4, "id_slot": slot["id"]}
            )

    async def run(self) -> bool:
        """All clients until the time is over, then what is left of it."""
        files, figures = self.server.open_files(), []
        self.start, self.read_before = time.monotonic(), self.server.read_bytes()
        self.end = self.start + 60 * self.options.minutes
        await asyncio.gather(
            *(self.worker(number) for number in range(self.options.clients)), self.resize(), self.watch(figures)
        )
        if not self.server.alive():
            self.fail(f"the server ended with {self.server.process.returncode}")
            return False
        if not self.options.embeddings:
            await self.all_slots()
        for line in self.server.panics():
            self.fail(f"log: {line[:200]}")
        # The kernel lets a little more through at first.
        rate = self.read_mib_per_s()
        if self.options.disk_mib and rate > 1.1 * self.options.disk_mib:
            self.fail(f"{rate} MiB were read per second: the limit of {self.options.disk_mib} does not hold")
        # Memory of the warm-up is taken within the first two tenths.
        steady = figures[min(1, len(figures) - 1)]
        if figures[-1] > steady * 1.05 + (16 << 10):
            self.fail(f"memory grew from {steady >> 10} to {figures[-1] >> 10} MiB")
        left = self.server.open_files()
        if left > files + 3:
            self.fail(f"{left} files are open, {files} at the start")
        say(
            minutes=self.options.minutes,
            requests=self.counts.total(),
            kinds=dict(sorted(self.counts.items())),
            events=self.events,
            resizes=self.resizes,
            worst_gap_ms=round(1e3 * self.worst_gap, 1),
            read_mib=(self.server.read_bytes() - self.read_before) >> 20,
            read_mib_per_s=rate,
            rss_anon_mib=[figure >> 10 for figure in figures],
            peak_mib=self.server.peak_kib() >> 10,
            open_files=[files, left],
            failures=dict(self.failures),
        )
        return not self.failures


def main() -> None:
    """Arguments, the server, the clients, its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = pathlib.Path(__file__).resolve().parents[2] / "models"
    parser.add_argument("--server", required=True, help="the program")
    parser.add_argument("--model", type=pathlib.Path, default=models / "demo.gguf")
    parser.add_argument("--flags", default="--expert-cache 50% --io direct", help="flags of the server about memory")
    parser.add_argument(
        "--text", type=pathlib.Path, default=models / "demo-heldout-prose.txt", help="file that prompts are taken from"
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--resize", type=float, default=1.0, help="seconds between resize signals")
    parser.add_argument("--disk-mib", type=int, help="MiB per second that the server may read (root)")
    parser.add_argument("--embeddings", action="store_true", help="a server of embeddings alone")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds after which a request is lost")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", help="the server's output (default: a file in the temporary directory)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # The server is ended too.
    with tempfile.TemporaryDirectory(prefix="hobbit-soak-") as directory:
        command = f"{options.server} -m '{options.model}' -np 4 -kvu -c 2048 {options.flags} --slots --metrics"
        command += " --embeddings --pooling mean" if options.embeddings else f" --slot-save-path '{directory}/'"
        reads = (str(options.model), options.disk_mib << 20) if options.disk_mib else None
        server = Server(command, options.log or os.path.join(directory, "server.log"), reads=reads)
        good = False
        try:
            server.wait_ready()
            good = asyncio.run(Soak(options, server).run())
        finally:
            if server.alive():
                code, seconds = server.terminate()
                say(exit_code=code, seconds_to_stop=round(seconds, 2))
                good = good and code == 0
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
