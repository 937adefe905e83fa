#!/usr/bin/env python3
"""Load on a server: throughput by clients, a mix of good, bad and rude requests, and how it stops.

    ./load.py rate --text ../../models/demo-heldout-prose.txt --server 'hobbit-server -m demo.gguf -np 4'
    ./load.py rate --text … --server '…' --limit-mib 900 --in-memory 'hobbit-server -m qwen.gguf' \\
        --used qwen3moe.expert_used_count=8
    ./load.py mix  --text … --server '…' --requests 2000
    ./load.py stall --text … --server '…' --bound-ms 2000
    ./load.py stop --text … --server '…'

Prints one JSON object per figure and exits with 1 when a check fails. The server is started here (host and port are
added to its command) and stopped here.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import tempfile
import time

from under_test import Client, Refused, Server


def say(**figures) -> None:
    """One line of results."""
    print(json.dumps(figures), flush=True)


def passages(text: str, count: int, words: int, seed: int) -> list[str]:
    """`count` stretches of `words` words of a text, none of which overlap."""
    parts = text.split()
    starts = list(range(0, len(parts) - words, words))
    if len(starts) < count:
        sys.exit(f"the text has {len(starts)} passages of {words} words, {count} are needed")
    random.Random(seed).shuffle(starts)
    return [" ".join(parts[start : start + words]) for start in starts[:count]]


def greedy(prompt: str, n_predict: int, **more) -> dict:
    """A request whose answer is determined."""
    return {"prompt": prompt, "n_predict": n_predict, "temperature": 0.0, "ignore_eos": True, **more}


def p(values: list[float], share: float) -> float:
    """Quantile by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def stream_one(client: Client, prompt: str, n_predict: int, **more) -> dict:
    """One streamed completion: when each token came, the final event, and with n_probs=2 how narrowly each token won:
    (characters of the text before it, difference of the logarithms of the two best probabilities)."""
    sent = time.monotonic()
    times, text, last, margins = [], "", {}, []
    body = greedy(prompt, n_predict, stream=True, cache_prompt=False, **more)
    async for at, data in client.events("/completion", body):
        event = json.loads(data)
        if "error" in event:
            raise RuntimeError(data)
        if event.get("stop"):
            last = event
        else:
            times.append(at)
            if "completion_probabilities" in event:
                best, second = (top["logprob"] for top in event["completion_probabilities"][0]["top_logprobs"])
                margins.append((len(text), best - second))
            text += event["content"]
    return {"sent": sent, "times": times, "text": text, "last": last, "margins": margins}


async def counts(client: Client) -> dict[str, float]:
    """hobbit's counters of decoding steps; none of a server that has no such metrics."""
    answer = await client.request("GET", "/metrics")
    lines = answer.body.decode().splitlines() if answer.status == 200 else []
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith("hobbit:"))}


def of_steps(before: dict[str, float], after: dict[str, float]) -> dict[str, float] | None:
    """Means of the decoding steps between two calls of `counts`."""
    since = {name: after[name] - before.get(name, 0.0) for name in after}
    n = since.get("hobbit:steps_total")
    if not n:
        return None
    bytes_read = since["hobbit:expert_bytes_read_total"]
    return {
        "streams": since["hobbit:step_streams_total"] / n,
        "seconds": since["hobbit:step_seconds_total"] / n,
        "experts": (since["hobbit:expert_hits_total"] + since["hobbit:expert_misses_total"]) / n,
        "bytes": bytes_read / n,
        "wait": since["hobbit:stall_seconds_total"] / n,
        "seconds_per_byte": since["hobbit:read_seconds_total"] / bytes_read if bytes_read else 0.0,
    }


async def single_step(options, command: str) -> float:
    """Seconds of a single stream's step."""
    server = Server(command + " --metrics", os.path.join(tempfile.gettempdir(), f"single-{os.getpid()}.log"))
    try:
        await asyncio.to_thread(server.wait_ready)
        client = Client(server)
        prompts = passages(options.text, 3, options.words, options.seed + 2)
        await stream_one(client, prompts.pop(), 8)
        before = await counts(client)
        for prompt in prompts:
            await stream_one(client, prompt, options.n_predict)
        return of_steps(before, await counts(client))["seconds"]
    finally:
        server.terminate()


class Bound:
    """Least time of a step of several streams, by what a single stream took on this machine: the ordinary weights once,
    then each expert of the union once and each missing byte once, at the same time. No read begins before its layer's
    router has chosen. An expert's product takes the time by which steps are shorter with one expert per token, with the
    whole model in memory."""

    def __init__(self, all_used: float, one_used: float, n_used: int):
        self.of_experts = (all_used - one_used) * n_used / (n_used - 1)
        self.ordinary = all_used - self.of_experts
        self.single: dict[str, float] | None = None

    def figures(self, step: dict[str, float]) -> dict[str, float]:
        """The bound of a step beside its time. The first step is that of a single stream."""
        single = self.single = self.single or step
        products = self.of_experts * step["experts"] / single["experts"]
        reads = step["bytes"] * single["seconds_per_byte"]
        bound = self.ordinary + max(products, reads)
        return {"bound_ms": 1e3 * bound, "of_bound": bound / step["seconds"], "bound_ordinary_ms": 1e3 * self.ordinary,
                "bound_products_ms": 1e3 * products, "bound_reads_ms": 1e3 * reads}


async def rate(options, server: Server) -> bool:
    """Tokens per second with 1, 2, 4, 8 clients: each has its prompts, one after another."""
    client = Client(server)
    bound = Bound(*options.in_memory_steps) if options.in_memory_steps else None
    total = sum(options.clients) * options.each
    prompts = iter(passages(options.text, total + 1, options.words, options.seed))
    await stream_one(client, next(prompts), options.n_predict)  # What is loaded and built once is not measured.
    base = None
    for clients in options.clients:
        work = [[next(prompts) for _ in range(options.each)] for _ in range(clients)]

        async def one(mine: list[str]) -> list[dict]:
            return [await stream_one(client, prompt, options.n_predict) for prompt in mine]

        before = await counts(client)
        start, read = time.monotonic(), server.read_bytes()
        streams = [stream for mine in await asyncio.gather(*map(one, work)) for stream in mine]
        wall = time.monotonic() - start
        tokens = sum(len(stream["times"]) for stream in streams)
        gaps = [b - a for stream in streams for a, b in zip(stream["times"], stream["times"][1:])]
        first = [stream["times"][0] - stream["sent"] for stream in streams]
        base = base or tokens / wall
        step = of_steps(before, await counts(client))
        steps = {}
        if step:
            shown = {"step_streams": step["streams"], "step_ms": 1e3 * step["seconds"],
                     "step_wait_ms": 1e3 * step["wait"], "step_experts": step["experts"],
                     "step_read_mib": step["bytes"] / 2**20}
            shown |= bound.figures(step) if bound else {}
            steps = {name: round(value, 3) for name, value in shown.items()}
        say(
            clients=clients,
            requests=len(streams),
            tokens=tokens,
            prompt_tokens=sum(stream["last"].get("timings", {}).get("prompt_n", 0) for stream in streams),
            seconds=round(wall, 2),
            tokens_per_second=round(tokens / wall, 3),
            against_one=round(tokens / wall / base, 3),
            first_token_ms_median=round(1e3 * p(first, 0.5), 1),
            first_token_ms_worst=round(1e3 * max(first), 1),
            gap_ms_median=round(1e3 * p(gaps, 0.5), 1),
            gap_ms_p99=round(1e3 * p(gaps, 0.99), 1),
            gap_ms_worst=round(1e3 * max(gaps), 1),
            rss_anon_mib=server.resident_kib() // 1024,
            read_mib_per_token=round((server.read_bytes() - read) / tokens / 2**20, 3),
            group_peak_mib=server.group.peak() >> 20 if server.group else None,
            **steps,
        )
    return True


KINDS = {
    "stream": 22,
    "whole": 14,
    "openai": 10,
    "slow reader": 6,
    "cancelled": 16,
    "dropped before the answer": 8,
    "body cut off": 5,
    "bad JSON": 8,
    "wrong types": 5,
    "too large": 3,
    "prompt too long": 3,
}


class Mix:
    """Requests of all kinds at once; every good one asks what a run alone has answered before."""

    def __init__(self, options, server: Server):
        self.options = options
        self.server = server
        self.client = Client(server)
        self.prompts = passages(options.text, options.prompts, options.words, options.seed)
        self.alone: list[str] = []
        self.margins: list[list[tuple[int, float]]] = []
        self.counts: dict[str, int] = {}
        self.failures: list[str] = []
        # Margins of the tokens at which answers left those of the run alone.
        self.ties: list[float] = []

    async def prepare(self) -> None:
        """The answers of a run alone."""
        for prompt in self.prompts:
            one = await stream_one(self.client, prompt, self.options.n_predict, n_probs=2)
            self.alone.append(one["text"])
            self.margins.append(one["margins"])
        if len(set(self.alone)) < len(self.alone):
            self.failures.append("two prompts have the same answer alone: a mix-up could hide; take other passages")

    def compare(self, which: int, text: str, kind: str) -> None:
        """Whether an answer is the one of its prompt."""
        if text == self.alone[which]:
            return
        if text in self.alone:
            self.failures.append(f"{kind}: prompt {which} got the answer of prompt {self.alone.index(text)}")
        else:
            # Wider batches are computed in another order: if two tokens are equally likely but for the last bits, the
            # other one may win.
            same = len(os.path.commonprefix([text, self.alone[which]]))
            margin = next((margin for start, margin in reversed(self.margins[which]) if start <= same), math.inf)
            self.ties.append(margin)
            if margin > self.options.tie:
                self.failures.append(
                    f"{kind}: prompt {which} answered otherwise than alone after {same} characters, "
                    f"where the margin was {margin:.4f}"
                )

    def refused(self, kind: str, status: int, expected: set[int]) -> None:
        """Whether a bad request was refused as it should be."""
        if status not in expected:
            self.failures.append(f"{kind}: status {status}, expected one of {sorted(expected)}")

    async def one(self, kind: str, rng: random.Random) -> None:
        """One request of a kind."""
        options, client = self.options, self.client
        which = rng.randrange(len(self.prompts))
        body = greedy(self.prompts[which], options.n_predict, cache_prompt=rng.random() < 0.5)
        if kind == "stream":
            text = ""
            async for _, data in client.events("/completion", body | {"stream": True}):
                text += json.loads(data)["content"]
            self.compare(which, text, kind)
        elif kind == "whole":
            answer = await client.post("/completion", body)
            self.compare(which, answer.json()["content"], kind)
        elif kind == "openai":
            answer = await client.post("/v1/completions", body)
            self.compare(which, answer.json()["choices"][0]["text"], kind)
        elif kind == "slow reader":
            text = ""
            async for _, data in client.events("/completion", body | {"stream": True}, pause=rng.uniform(0.05, 0.4)):
                text += json.loads(data)["content"]
            self.compare(which, text, kind)
        elif kind == "cancelled":
            body |= {"n_predict": 100_000, "stream": rng.random() < 0.8}
            try:
                async with asyncio.timeout(rng.uniform(0.01, 1.0)):
                    async for _ in client.events("/completion", body):
                        pass
            except TimeoutError:
                pass
            except Refused as refusal:
                if refusal.answer.status != 200:
                    raise
        elif kind == "dropped before the answer":
            _, writer = await client.connect()
            raw = json.dumps(body).encode()
            writer.write(client.head("POST", "/completion", len(raw)) + raw)
            await writer.drain()
            writer.transport.abort()
        elif kind == "body cut off":
            _, writer = await client.connect()
            raw = json.dumps(body).encode()
            writer.write(client.head("POST", "/completion", len(raw)) + raw[: rng.randrange(len(raw))])
            await writer.drain()
            await asyncio.sleep(rng.uniform(0, 0.2))
            writer.close()
        elif kind == "bad JSON":
            raw = json.dumps(body).encode()
            at = rng.randrange(1, len(raw) - 1)
            # A closing brace may make a whole object of a part: then it is none.
            answer = await client.request("POST", "/completion", raw[:at] + rng.choice([b"", b"]", b"\xff", b"\x00"]))
            self.refused(kind, answer.status, {400, 413, 415, 422})
        elif kind == "wrong types":
            wrong = rng.choice(
                [{"prompt": 7}, {"n_predict": "many"}, {"stop": {"a": 1}, "prompt": None}, {"prompt": {}}])
            answer = await client.post("/completion", body | wrong)
            self.refused(kind, answer.status, {400, 422})
        elif kind == "too large":
            size = options.oversized
            answer = await client.request("POST", "/completion", b'{"prompt":"' + b"a" * size + b'"}')
            self.refused(kind, answer.status, {413, 400})
        elif kind == "prompt too long":
            answer = await client.post("/completion", body | {"prompt": "word " * 60_000})
            self.refused(kind, answer.status, {400, 413})

    async def run(self) -> bool:
        """All requests, `clients` at once."""
        await self.prepare()
        options = self.options
        rng = random.Random(options.seed)
        kinds = rng.choices(list(KINDS), KINDS.values(), k=options.requests)
        left = list(enumerate(kinds))
        left.reverse()
        memory = [self.server.resident_kib()]
        start = time.monotonic()
        done = 0

        async def worker() -> None:
            nonlocal done
            while left:
                number, kind = left.pop()
                mine = random.Random(options.seed * 1_000_003 + number)
                try:
                    await asyncio.wait_for(self.one(kind, mine), options.patience)
                except Exception as failure:  # Whatever it is, it is this request's failure.
                    if kind == "too large" and isinstance(failure, OSError):
                        pass  # The connection may be closed while a refused body is still sent.
                    else:
                        self.failures.append(f"{kind} (request {number}): {type(failure).__name__} {failure}"[:400])
                self.counts[kind] = self.counts.get(kind, 0) + 1
                done += 1
                if done % (options.requests // 20 or 1) == 0:
                    memory.append(self.server.resident_kib())
                    seconds = round(time.monotonic() - start, 1)
                    say(done=done, seconds=seconds, rss_anon_kib=memory[-1], failures=len(self.failures))
                if not self.server.alive():
                    left.clear()

        await asyncio.gather(*(worker() for _ in range(options.concurrency)))
        # Nothing may be left running: all slots come free, and each prompt is answered as before.
        end = time.monotonic() + 60
        busy = None
        while self.server.alive() and time.monotonic() < end:
            slots = (await self.client.request("GET", "/slots")).json()
            busy = sum(slot["is_processing"] for slot in slots)
            if busy == 0:
                break
            await asyncio.sleep(0.2)
        if busy != 0:
            self.failures.append(f"{busy} slots are still busy a minute after the last request")
        for which, prompt in enumerate(self.prompts):
            if self.server.alive():
                self.compare(which, (await stream_one(self.client, prompt, options.n_predict))["text"], "afterwards")
        quarter = memory[len(memory) // 4]
        say(
            requests=done,
            kinds=self.counts,
            seconds=round(time.monotonic() - start, 1),
            rss_anon_kib_start=memory[0],
            rss_anon_kib_quarter=quarter,
            rss_anon_kib_end=memory[-1],
            growth_after_quarter=round(memory[-1] / quarter - 1, 4),
            open_files=self.server.open_files() if self.server.alive() else None,
            group_peak_mib=self.server.group.peak() >> 20 if self.server.group else None,
            alive=self.server.alive(),
            panics=self.server.panics(),
            left_at_a_tie=sum(margin <= options.tie for margin in self.ties),
            widest_tie=round(max(self.ties, default=0.0), 5),
            failures=len(self.failures),
        )
        for failure in self.failures[:40]:
            say(failure=failure)
        flat = memory[-1] <= quarter * (1 + options.growth) + (8 << 10)
        if not flat:
            say(failure=f"memory grew by more than {options.growth:.0%} and 8 MiB after the first quarter")
        return not self.failures and flat and self.server.alive() and not self.server.panics()


async def stall(options, server: Server) -> bool:
    """Streams while long prompts arrive: the longest time that any of them waits for its next token."""
    client = Client(server)
    long = passages(options.text, options.long_prompts, options.long_words, options.seed)
    short = passages(options.text, 3, options.words, options.seed + 1)
    await stream_one(client, short.pop(), 8)

    def gaps(streams: list[dict]) -> list[float]:
        return [b - a for stream in streams for a, b in zip(stream["times"], stream["times"][1:])]

    alone = gaps(await asyncio.gather(*(stream_one(client, prompt, options.n_predict) for prompt in short)))
    over = asyncio.Event()

    async def keep_on(prompt: str) -> list[dict]:
        streams = []
        while not over.is_set():
            streams.append(await stream_one(client, prompt, options.n_predict))
        return streams

    streams = [asyncio.create_task(keep_on(prompt)) for prompt in short]
    await asyncio.sleep(1)
    first, prompt_tokens = [], 0
    for prompt in long:
        one = await stream_one(client, prompt, 2)
        first.append(one["times"][0] - one["sent"])
        prompt_tokens += one["last"]["timings"]["prompt_n"]
    over.set()
    busy = gaps([stream for mine in await asyncio.gather(*streams) for stream in mine])
    say(
        streams=len(short),
        long_prompts=len(first),
        long_prompt_tokens=prompt_tokens,
        long_first_token_ms_worst=round(1e3 * max(first), 1),
        gap_ms_worst_without=round(1e3 * max(alone), 1),
        gap_ms_median=round(1e3 * p(busy, 0.5), 1),
        gap_ms_p99=round(1e3 * p(busy, 0.99), 1),
        gap_ms_worst=round(1e3 * max(busy), 1),
        bound_ms=options.bound_ms,
    )
    return options.bound_ms is None or 1e3 * max(busy) <= options.bound_ms


async def stop(options, server: Server) -> bool:
    """SIGTERM with streams running: each ends with its last event or with an error event, and the process with 0."""
    client = Client(server)
    prompts = passages(options.text, 6, options.words, options.seed)
    ends: list[str] = []

    async def one(prompt: str) -> None:
        last = None
        try:
            async for _, data in client.events("/completion", greedy(prompt, 100_000, stream=True)):
                last = json.loads(data)
        except Refused as refusal:
            # One that waited for a slot: a refusal is an answer.
            ends.append("refused" if refusal.answer.status == 503 else f"bad: status {refusal.answer.status}")
            return
        except (OSError, asyncio.IncompleteReadError, ValueError) as failure:
            ends.append(f"bad: cut off ({type(failure).__name__}: {failure})")
            return
        ended = last is not None and (last.get("stop") is True or "error" in last)
        ends.append(("error event" if "error" in last else "finished") if ended else f"bad: ended with {last}")

    running = [asyncio.create_task(one(prompt)) for prompt in prompts]
    await asyncio.sleep(options.before_stop)
    code, seconds = await asyncio.to_thread(server.terminate, options.patience)
    await asyncio.wait(running, timeout=10)
    say(exit_code=code, seconds_to_stop=round(seconds, 2), streams=ends, panics=server.panics())
    return code == 0 and len(ends) == len(prompts) and not any(end.startswith("bad") for end in ends)


def main() -> None:
    """Arguments, the server, the mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["rate", "mix", "stall", "stop"])
    parser.add_argument("--server", required=True, help="command of the server, without --host and --port")
    parser.add_argument("--against", help="rate: command of another server; the two run in the order A, B, B, A")
    parser.add_argument("--in-memory", help="rate: command of a server with the whole model in memory; the bound of "
                        "each figure is printed, if --server has --metrics")
    parser.add_argument("--used", help="rate: with --in-memory, KEY=N: the model's key for experts per token")
    parser.add_argument("--text", required=True, help="file that prompts are taken from")
    parser.add_argument("--words", type=int, default=24, help="words of a prompt")
    parser.add_argument("--n-predict", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=lambda s: [int(n) for n in s.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--each", type=int, default=3, help="rate: requests of each client")
    parser.add_argument("--requests", type=int, default=2000, help="mix: how many")
    parser.add_argument("--concurrency", type=int, default=12, help="mix: how many at once")
    parser.add_argument("--prompts", type=int, default=12, help="mix: different prompts")
    parser.add_argument("--tie", type=float, default=0.01,
                        help="mix: margin of two tokens' logarithms that last bits may turn")
    parser.add_argument("--oversized", type=int, default=64 << 20, help="mix: bytes of a body that is too large")
    parser.add_argument("--growth", type=float, default=0.03,
                        help="mix: share by which memory may grow after a quarter")
    parser.add_argument("--long-words", type=int, default=250, help="stall: words of a long prompt")
    parser.add_argument("--long-prompts", type=int, default=6, help="stall: how many arrive, one after another")
    parser.add_argument("--bound-ms", type=float, help="stall: longest gap that passes")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds after which a request is lost")
    parser.add_argument("--before-stop", type=float, default=3.0, help="stop: seconds of streaming before SIGTERM")
    parser.add_argument("--limit-mib", type=int,
                        help="control group's limit; its models leave the page cache first (root)")
    parser.add_argument("--log", help="the server's output (default: a file in the temporary directory)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # The server is ended too.
    if options.against and options.mode != "rate":
        parser.error("--against is for rate")
    with open(options.text) as file:
        options.text = file.read()
    options.in_memory_steps = None
    if options.in_memory:
        key, _, n_used = (options.used or "").partition("=")
        if not n_used.isdecimal() or int(n_used) < 2:
            parser.error("--in-memory needs --used KEY=N, N at least 2")
        commands = [options.in_memory, f"{options.in_memory} --override-kv {key}=int:1"]
        all_used, one_used = (asyncio.run(single_step(options, command)) for command in commands)
        say(single_step_ms=round(1e3 * all_used, 3), with_one_expert_ms=round(1e3 * one_used, 3))
        options.in_memory_steps = (all_used, one_used, int(n_used))
    # A disk's speed drifts: each of two servers is measured twice, the other between.
    order = [options.server, options.against, options.against, options.server] if options.against else [options.server]
    good = [run(options, command) for command in order]
    sys.exit(0 if all(good) else 1)


def run(options, command: str) -> bool:
    """One server from its start to its end."""
    log = options.log or os.path.join(tempfile.gettempdir(), f"server-{os.getpid()}.log")
    if options.against:
        say(server=os.path.basename(command.split()[0]))
    server = Server(command, log, limit=options.limit_mib << 20 if options.limit_mib else None)
    try:
        server.wait_ready()
        if options.mode == "mix":
            good = asyncio.run(Mix(options, server).run())
        else:
            good = asyncio.run({"rate": rate, "stall": stall, "stop": stop}[options.mode](options, server))
    finally:
        if server.alive():
            code, seconds = server.terminate()
            say(exit_code=code, seconds_to_stop=round(seconds, 2))
    return good


if __name__ == "__main__":
    main()
