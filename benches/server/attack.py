#!/usr/bin/env python3
"""Attacks on a server over loopback, in groups. After each group the server must be unchanged.

    ./attack.py --server hobbit-server                              # one round, about a minute
    ./attack.py --server hobbit-server --seconds 3600 --json attack.json
    ./attack.py --server hobbit-server --only 'bodies|framing'

A group fails when the server ends, answers with a 5xx other than 501 and 503 or not at all, needs longer than
`--health-ms` for /health, or takes more memory than its budget; and when afterwards a slot is busy, more files are open
than at the start, or a request gets another text. A server that has ended or hangs is started again for the next
request. The first round is always finished; further ones, with longer holds and more mutations, begin until `--seconds`
are over. Prints a table and exits with 1 when a group failed.
"""

import argparse
import asyncio
import collections
import dataclasses
import json
import multiprocessing
import pathlib
import random
import re
import resource
import signal
import socket
import sys
import tempfile
import time

import attack_requests
import attack_wire
from attack_files import Gguf
from under_test import Answer, Client, NotReady, Server, read_body, read_head

SAME = {
    "prompt": "In the beginning God created",
    "n_predict": 16,
    "temperature": 0.0,
    "cache_prompt": False,
    "lora": [],
}
# Deaths and hangs in one group after which it is given up.
DEATHS_MAX = 5


@dataclasses.dataclass
class Group:
    """A kind of attack. `open_files` (a limit) and `strings` (to replace in the model's metadata) give it a server of
    its own."""

    name: str
    run: object
    open_files: int | None = None
    strings: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether the server is one for this group alone."""
        return bool(self.open_files or self.strings)


REQUESTS = [
    Group("tokenise", attack_requests.tokenise),
    *(
        Group(f"tokenise, {pre}", attack_requests.pre_tokenizer, strings={"tokenizer.ggml.pre": pre})
        for pre in ("gpt-4o", "llama4", "deepseek-v3", "tekken", "minimax-m2", "bailingmoe", "default")
    ),
    Group("bodies", attack_requests.hostile),
    Group("mutations", attack_requests.mutations),
    Group("costly", attack_requests.costly),
    Group("large", attack_requests.large),
    Group("adapters", attack_requests.adapters),
    Group("overwriting", attack_requests.overwriting),
    Group("changed slots", attack_requests.changed_slots),
    Group("mix", attack_requests.mix),
    Group("origins", attack_requests.origins),
    Group("shared context", attack_requests.shared_context),
    Group("vanished", attack_requests.vanished),
    Group("framing", attack_wire.framing),
    Group("http2", attack_wire.http2),
    Group("slow", attack_wire.slow),
    Group("silent", attack_wire.silent, open_files=256),
]

# Templates that never end, or end what runs them.
TEMPLATES = {
    "calls itself": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "holds itself": "{% set a = [] %}{% set _ = a.append(a) %}{{ a }}",
    "endless range": "{% for i in range(10000000000) %}{% endfor %}",
    "ranges in ranges": "{% for i in range(100000) %}{% for j in range(100000) %}{{ j }}{% endfor %}{% endfor %}",
    "text of 10^11": "{{ 'a' * 100000000000 }}",
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "blocks": "{% if 1 %}" * 20_000 + "{% endif %}" * 20_000,
    "not closed": "{% for m in messages %}{{ m.content ",
}


def probe(port: int, worst, missed) -> None:
    """Asks for /health again and again, in a process of its own: the work of the attacks must not slow it down."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    request = f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()
    while True:
        start, good = time.monotonic(), False
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(request)
                good = connection.recv(64).startswith(b"HTTP/1.1 200")
        except OSError:
            pass
        worst.value = max(worst.value, time.monotonic() - start)
        missed.value += not good
        time.sleep(0.05)


class GivenUp(Exception):
    """The server has ended too often in this group."""


class Attack:
    """The server under attack, and the figures and failures of the group that runs."""

    def __init__(self, options, directory: pathlib.Path, group: Group, rng: random.Random):
        self.options = options
        self.directory = directory
        self.slots = directory / "slots"
        self.group = group
        self.rng = rng
        self.worst = multiprocessing.Value("d", 0.0, lock=False)
        self.missed = multiprocessing.Value("i", 0, lock=False)
        self.probing: multiprocessing.Process | None = None
        self.server: Server | None = None
        self.text = ""
        self.begin()

    def begin(self) -> None:
        """Sets the counts of a group to nothing."""
        self.statuses: collections.Counter = collections.Counter()
        self.failures: list[str] = []
        self.sent = self.deaths = 0
        self.worst.value, self.missed.value = 0.0, 0

    def start(self) -> None:
        """A server, and what it is like when nothing has happened yet."""
        model, options = self.options.model, self.options
        if self.group.strings:
            model = Gguf(model).with_strings(self.directory / "changed.gguf", self.group.strings)
        command = (
            f"{options.server} -m '{model}' -c 2048 --temp 0 -fa off --mem-budget {options.budget_mib}MiB --metrics"
            f" --slot-save-path '{self.slots}/' --lora '{self.directory}/lora.gguf' --lora-init-without-apply"
        )
        self.server = Server(
            command,
            str(self.directory / "server.log"),
            address_space=options.address_space_gib << 30,
            open_files=self.group.open_files,
        )
        try:
            self.server.wait_ready(60)
        except NotReady:
            self.stop()
            raise
        self.client = Client(self.server)
        self.text = asyncio.run(self.client.post("/completion", SAME)).json()["content"]
        self.files = self.server.open_files()
        self.probing = multiprocessing.Process(
            target=probe, args=(self.server.port, self.worst, self.missed), daemon=True
        )
        self.probing.start()

    def stop(self) -> None:
        """Ends the server and the probe."""
        if self.probing:
            self.probing.terminate()
            self.probing.join()
            self.probing = None
        if self.server and self.server.alive():
            self.server.process.kill()
            self.server.process.wait()
        self.server = None

    def fail(self, message: str) -> None:
        """Something is wrong."""
        self.failures.append(message)

    def count(self, status: int | None, times: int = 1) -> None:
        """Something was sent. None: it has no answer."""
        self.sent += times
        self.statuses[f"{status // 100}xx" if status else "none"] += times

    async def died(self, name: str) -> None:
        """The server has ended, or must be ended: another one is started."""
        self.deaths += 1
        code = self.server.process.poll()
        self.fail(f"{name}: the server {'hangs' if code is None else f'ended with {code}'}{last_words(self.server)}")
        self.stop()
        if self.deaths >= DEATHS_MAX:
            raise GivenUp
        await asyncio.to_thread(self.start)

    async def connect(self, buffer: int | None = None, timeout: float = 5.0):
        """A connection, or None and None. `buffer`: most bytes that wait here to be read."""
        plain = socket.socket()
        plain.setblocking(False)
        if buffer:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        try:
            await asyncio.wait_for(
                asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", self.server.port)), timeout
            )
            return await asyncio.open_connection(sock=plain, limit=buffer or 1 << 20)
        except (OSError, TimeoutError):
            plain.close()
            self.count(None)
            return None, None

    async def send(
        self,
        name: str,
        path: str,
        body,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        may_cut: bool = False,
    ) -> Answer | None:
        """Sends a request and checks that its answer is one that a server may give. `may_cut`: the connection may be
        closed while the body is sent."""
        server = self.server
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            answer = await asyncio.wait_for(self.exchange(method, path, raw, headers or {}), self.options.patience)
        except TimeoutError:
            self.count(None)
            if server is self.server:
                await self.died(f"{name} ({path}), no answer in {self.options.patience:.0f} s")
            return None
        except (OSError, ValueError, asyncio.IncompleteReadError) as cut:
            self.count(None)
            await asyncio.sleep(0.2)  # A process that has crashed takes a moment to end.
            if server is not self.server:
                return None  # It died of something else that was sent at the same time.
            if not server.alive():
                await self.died(f"{name} ({path})")
            elif not may_cut:
                self.fail(f"{name} ({path}): {type(cut).__name__} {cut}")
            return None
        self.count(answer.status)
        if answer.status >= 500 and answer.status not in (501, 503):
            self.fail(f"{name} ({path}): {answer.status} {answer.body[:200]!r}")
        return answer

    async def exchange(self, method: str, path: str, raw: bytes | None, headers: dict[str, str]) -> Answer:
        """As Client.request, with headers in place of the usual ones."""
        reader, writer = await self.client.connect()
        try:
            lines = {"Host": f"127.0.0.1:{self.server.port}", "Connection": "close", "Content-Type": "application/json"}
            if raw is not None:
                lines["Content-Length"] = str(len(raw))
            head = "".join(f"{name}: {value}\r\n" for name, value in (lines | headers).items())
            try:
                writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + (raw or b""))
                await writer.drain()
            except OSError:
                pass  # A refusal may come before the body was sent.
            status, found = await read_head(reader)
            body = b"" if method == "HEAD" else b"".join([piece async for piece in read_body(reader, found)])
            return Answer(status, found, body)
        finally:
            writer.transport.abort()

    async def same_text(self, when: str, timeout: float = 20.0) -> None:
        """Whether a request gets what it got at the start."""
        try:
            answer = await self.client.post("/completion", SAME, timeout)
            content = answer.json().get("content")
        except TimeoutError:
            return self.fail(f"{when}: no answer to an ordinary request in {timeout:.0f} s")
        except (OSError, ValueError, asyncio.IncompleteReadError) as failure:
            return self.fail(f"{when}: an ordinary request fails: {type(failure).__name__} {failure}")
        if content != self.text:
            self.fail(
                f"{when}: an ordinary request gets {answer.status} {(content or answer.body)[:200]!r},"
                f" at the start {self.text!r}"
            )

    async def aftermath(self) -> None:
        """Checks that the group left the server unchanged."""
        server, failures = self.server, len(self.failures)
        await self.same_text("afterwards")
        busy, files, end = None, 0, time.monotonic() + 15
        while time.monotonic() < end and server.alive():
            try:
                slots = (await self.client.request("GET", "/slots", timeout=5)).json()
                busy = sum(slot["is_processing"] for slot in slots)
            except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
                pass
            files = server.open_files()
            if busy == 0 and files <= self.files + 3:  # The probe's own, and one that is being closed.
                break
            await asyncio.sleep(0.2)
        else:
            if server.alive():
                self.fail(f"afterwards {busy} slots are busy and {files} files open, {self.files} at the start")
        if self.missed.value and self.deaths == 0:
            self.fail(f"/health was not answered {self.missed.value} times")
        if self.worst.value > self.options.health_ms / 1e3 and self.deaths == 0:
            self.fail(f"/health took {1e3 * self.worst.value:.0f} ms, more than {self.options.health_ms:.0f}")
        for line in server.panics():
            self.fail(f"log: {line[:300]}")
        if not server.alive():
            await self.died("afterwards")
        elif server.peak_kib() > self.options.budget_mib << 10:
            self.fail(f"{server.peak_kib() >> 10} MiB were resident, the budget is {self.options.budget_mib}")
        elif len(self.failures) > failures:
            self.stop()  # The next group shall not suffer from this one.

    async def attacked(self) -> None:
        """One group from its first request to the last check."""
        self.server.forget_peak()
        try:
            await asyncio.wait_for(self.group.run(self), self.options.group_seconds)
            await self.aftermath()
        except GivenUp:
            self.fail(f"given up after {self.deaths} deaths")
        except TimeoutError:
            self.fail(f"not done in {self.options.group_seconds:.0f} s")
            self.stop()

    def go(self, group: Group) -> dict:
        """Runs a group. Its figures."""
        self.group = group
        self.begin()
        start = time.monotonic()
        try:
            if not (self.server and self.server.alive()):
                self.stop()
                self.start()
                self.worst.value, self.missed.value = 0.0, 0
            asyncio.run(self.attacked())
        except NotReady as failure:
            self.fail(str(failure))
        peak = self.server.peak_kib() >> 10 if self.server and self.server.alive() else None
        return {
            "group": group.name,
            "sent": self.sent,
            "statuses": dict(sorted(self.statuses.items())),
            "deaths": self.deaths,
            "health_ms": round(1e3 * self.worst.value, 1),
            "peak_mib": peak,
            "seconds": round(time.monotonic() - start, 1),
            "failures": list(dict.fromkeys(self.failures)),
        }


def last_words(server: Server) -> str:
    """Why a server ended, if its log says it."""
    words = ("overflow", "panicked", "memory allocation", "bad_alloc", "ASSERT", "Sanitizer")
    lines = pathlib.Path(server.log).read_text(errors="replace").splitlines()
    found = [line for line in lines if any(word in line for word in words)]
    return f": {found[-1][:200]}" if found else ""


def templates(options, directory: pathlib.Path) -> dict:
    """Starts with hostile chat templates, from the model and from a file: refused by name, or served; never a crash."""
    start, failures, sent, deaths = time.monotonic(), [], 0, 0
    for name, text in TEMPLATES.items():
        for place in ("model", "file"):
            model, flags = options.model, ""
            if place == "model":
                model = Gguf(model).with_strings(directory / "template.gguf", {"tokenizer.chat_template": text})
            else:
                (directory / "template.jinja").write_text(text)
                flags = f"--chat-template-file '{directory}/template.jinja'"
            log = directory / "template.log"
            server = Server(
                f"{options.server} -m '{model}' -c 512 --mem-budget {options.budget_mib}MiB {flags}",
                str(log),
                address_space=options.address_space_gib << 30,
            )
            sent += 1
            where = f"template {name!r} in the {place}"
            try:
                server.wait_ready(options.template_seconds)
                answer = asyncio.run(
                    Client(server).post(
                        "/v1/chat/completions",
                        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
                        options.template_seconds,
                    )
                )
                if answer.status >= 500:
                    failures.append(f"{where}: a chat is answered with {answer.status}")
            except NotReady:
                if server.alive():
                    failures.append(f"{where}: the load hangs")
                elif server.process.returncode in (0, 1) and "--chat-template" not in log.read_text(errors="replace"):
                    failures.append(f"{where}: refused without naming --chat-template")
            except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as failure:
                failures.append(f"{where}: {type(failure).__name__} for a chat")
            if server.alive():
                _, seconds = server.terminate(10)
                if seconds > 5:
                    failures.append(f"{where}: SIGTERM took {seconds:.1f} s")
            elif server.process.returncode not in (0, 1):
                deaths += 1
                failures.append(f"{where}: the server ended with {server.process.returncode}{last_words(server)}")
    return {
        "group": "templates",
        "sent": sent,
        "statuses": {},
        "deaths": deaths,
        "health_ms": None,
        "peak_mib": None,
        "seconds": round(time.monotonic() - start, 1),
        "failures": failures,
    }


def table(results: list[dict]) -> str:
    """All groups of all rounds, a line each, and below it what failed."""
    merged: dict[str, dict] = {}
    for result in results:
        into = merged.setdefault(
            result["group"],
            {
                "rounds": 0,
                "sent": 0,
                "deaths": 0,
                "health": 0.0,
                "peak": 0,
                "failed": [],
                "statuses": collections.Counter(),
            },
        )
        into["rounds"] += 1
        into["sent"] += result["sent"]
        into["deaths"] += result["deaths"]
        into["health"] = max(into["health"], result["health_ms"] or 0.0)
        into["peak"] = max(into["peak"], result["peak_mib"] or 0)
        into["statuses"].update(result["statuses"])
        into["failed"] += result["failures"]
    lines = [
        f"{'group':<22}{'rounds':>7}{'sent':>8}{'2xx':>7}{'4xx':>7}{'5xx':>6}{'none':>7}{'deaths':>8}{'health ms':>11}"
        f"{'peak MiB':>10}  verdict"
    ]
    for name, of in merged.items():
        shown = [of["statuses"][kind] for kind in ("2xx", "4xx", "5xx", "none")]
        lines.append(
            f"{name:<22}{of['rounds']:>7}{of['sent']:>8}{shown[0]:>7}{shown[1]:>7}{shown[2]:>6}{shown[3]:>7}"
            f"{of['deaths']:>8}"
            f"{of['health'] or '':>11}{of['peak'] or '':>10}  {'FAILED' if of['failed'] else 'held'}"
        )
    for name, of in merged.items():
        for failure, times in collections.Counter(of["failed"]).most_common(20):
            lines.append(f"{name}: {failure}" + (f" ({times} times)" if times > 1 else ""))
    return "\n".join(lines)


def main() -> None:
    """Arguments, rounds, the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = pathlib.Path(__file__).resolve().parents[2] / "models" / "demo.gguf"
    parser.add_argument("--server", required=True, help="the program, with flags of its own if needed")
    parser.add_argument(
        "--model", type=pathlib.Path, default=model, help="a small model with a vocabulary of BPE (default: demo)"
    )
    parser.add_argument("--seconds", type=float, default=60, help="no round begins after these; the first always does")
    parser.add_argument("--only", help="groups whose names match this")
    parser.add_argument("--json", type=pathlib.Path, help="file for all figures")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--budget-mib", type=int, default=300, help="--mem-budget of the server, and what may be resident"
    )
    parser.add_argument("--health-ms", type=float, default=1_000, help="the longest that /health may take")
    parser.add_argument("--patience", type=float, default=20, help="seconds after which a request counts as hung")
    parser.add_argument("--group-seconds", type=float, default=300, help="seconds after which a group is given up")
    parser.add_argument(
        "--template-seconds", type=float, default=20, help="seconds that a load with a hostile template may take"
    )
    parser.add_argument("--hold", type=float, default=3, help="seconds that slow clients stay")
    parser.add_argument("--mutate", type=float, default=5, help="seconds of mutated bodies")
    parser.add_argument("--idle-limit", type=float, default=120, help="seconds in which idle connections must be ended")
    parser.add_argument("--address-space-gib", type=int, default=8, help="what the server may map at most")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # The server is ended too.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    groups = list(REQUESTS)
    if options.seconds >= 600 or options.only:
        groups.append(Group("left alone", attack_wire.left_alone))
    wanted = re.compile(options.only or "")
    results, began, number = [], time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="hobbit-attack-") as name:
        directory = pathlib.Path(name)
        (directory / "slots").mkdir()
        Gguf(options.model).lora(directory / "lora.gguf")
        common = Attack(options, directory, REQUESTS[0], random.Random(options.seed))

        def report(result: dict) -> None:
            results.append(result | {"round": number})
            print(
                f"{result['group']}: {'FAILED' if result['failures'] else 'held'} in {result['seconds']} s",
                file=sys.stderr,
                flush=True,
            )

        try:
            while number == 0 or time.monotonic() - began < options.seconds:
                number += 1
                if number == 2:
                    options.mutate, options.hold = 6 * options.mutate, 5 * options.hold
                for group in groups:
                    if not wanted.search(group.name):
                        continue
                    if group.is_own:
                        own = Attack(options, directory, group, common.rng)
                        try:
                            report(own.go(group))
                        finally:
                            own.stop()
                    else:
                        report(common.go(group))
                if wanted.search("templates"):
                    report(templates(options, directory))
            if common.server and common.server.alive():
                code, seconds = common.server.terminate(10)
                if code != 0:
                    results.append(
                        {
                            "group": "end",
                            "round": number,
                            "sent": 1,
                            "statuses": {},
                            "deaths": 0,
                            "health_ms": None,
                            "peak_mib": None,
                            "seconds": round(seconds, 1),
                            "failures": [f"SIGTERM: status {code}"],
                        }
                    )
        finally:
            common.stop()
    if not results:
        sys.exit(f"no group matches {options.only}")
    print(table(results))
    failed = sorted({result["group"] for result in results if result["failures"]})
    deaths = sum(result["deaths"] for result in results)
    sent = sum(result["sent"] for result in results)
    print(
        f"{number} rounds, {sent} sent in {time.monotonic() - began:.0f} s; the server ended or hung {deaths} times; "
        + (f"failed: {'; '.join(failed)}" if failed else "every group held")
    )
    if options.json:
        options.json.write_text(
            json.dumps({"rounds": number, "deaths": deaths, "failed": failed, "groups": results}, indent=1) + "\n"
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
