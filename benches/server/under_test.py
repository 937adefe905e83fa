"""The server under test: started, watched and stopped; and a small HTTP/1.1 client on asyncio that can misbehave.

Only the standard library: a client library would hide what is tested here (cut connections, slow readers, bodies that
are not JSON).
"""

import asyncio
import dataclasses
import json
import os
import pathlib
import resource
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class NotReady(SystemExit):
    """The server did not start. A program that does not catch this ends with the message."""


class Group:
    """A control group of version 1 or 2 that limits memory, reads from the disk of a file, or both. Needs root."""

    def __init__(self, memory: int | None = None, reads: tuple[str, int] | None = None):
        root = pathlib.Path("/sys/fs/cgroup")
        self.second = (root / "cgroup.controllers").exists()
        self.paths: list[pathlib.Path] = []
        if memory:
            self.write("memory", "memory.max" if self.second else "memory.limit_in_bytes", str(memory))
        if reads:
            path, rate = reads
            if self.second:
                self.write("io", "io.max", f"{disk_of(path)} rbps={rate}")
            else:
                self.write("blkio", "blkio.throttle.read_bps_device", f"{disk_of(path)} {rate}")

    def write(self, controller: str, name: str, value: str) -> None:
        """Sets a limit, in a directory that is made for it where there is none yet."""
        root = pathlib.Path("/sys/fs/cgroup")
        path = (root if self.second else root / controller) / f"server-{os.getpid()}"
        path.mkdir(exist_ok=True)
        if path not in self.paths:
            self.paths.append(path)
        (path / name).write_text(value)

    def join(self) -> None:
        """Puts the calling process in."""
        for path in self.paths:
            (path / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int | None:
        """Most bytes that were in use, page cache included. None where memory is not limited."""
        for path in self.paths:
            for name in ("memory.peak", "memory.max_usage_in_bytes"):
                if (path / name).exists():
                    return int((path / name).read_text())
        return None

    def remove(self) -> None:
        """Removes the group, which no process may be in any more."""
        for path in self.paths:
            path.rmdir()


def disk_of(path: str) -> str:
    """`major:minor` of the whole disk that a file lies on."""
    device = os.stat(path).st_dev
    of = pathlib.Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if (of / "partition").exists():
        of = of.parent
    return (of / "dev").read_text().strip()


def leave_page_cache(path: str) -> None:
    """Drops a file's pages: a page that another group has paid for would be free memory."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Server:
    """A server process and where it answers. `command` is a shell-like line; `--host` and `--port` are added to it.
    `limit`: bytes of a control group that it gets of its own; `reads`: a file, and bytes per second that may be read
    from its disk; `address_space`: bytes that it may map at most, so that one that takes all memory takes only its own;
    `open_files`: how many descriptors it may have."""

    def __init__(self, command: str, log: str, key: str | None = None, limit: int | None = None,
                 reads: tuple[str, int] | None = None, address_space: int | None = None,
                 open_files: int | None = None):
        self.port = free_port()
        self.key = key
        self.log = log
        arguments = shlex.split(command) + ["--host", "127.0.0.1", "--port", str(self.port)]
        if key:
            arguments += ["--api-key", key]
        self.group = Group(limit, reads) if limit or reads else None
        if self.group:
            for argument in arguments:
                if argument.endswith(".gguf"):
                    leave_page_cache(argument)

        def prepare() -> None:
            if self.group:
                self.group.join()
            if address_space:
                resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
            if open_files:
                resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

        with open(log, "wb") as output:
            # Every run begins with empty caches.
            environment = os.environ | {"HOBBIT_ARG_CACHE_STATE": "off"}
            self.process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, preexec_fn=prepare,
                                            env=environment)

    @property
    def url(self) -> str:
        """Root of all endpoints."""
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self, seconds: float = 120.0) -> None:
        """Until /health says 200. NotReady when the process ends or `seconds` pass."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise NotReady(f"the server ended with {self.process.returncode} before it was ready; see {self.log}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.05)
        raise NotReady(f"the server was not ready in {seconds:.0f} s; see {self.log}")

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def resident_kib(self) -> int:
        """Resident memory of the process in KiB, anonymous part only: mapped files come and go with the page cache."""
        with open(f"/proc/{self.process.pid}/status") as status:
            fields = dict(line.split(":", 1) for line in status if ":" in line)
        return int(fields["RssAnon"].split()[0])

    def peak_kib(self) -> int:
        """Largest resident set since the start, or since `forget_peak`, in KiB, mapped files included."""
        with open(f"/proc/{self.process.pid}/status") as status:
            fields = dict(line.split(":", 1) for line in status if ":" in line)
        return int(fields["VmHWM"].split()[0])

    def forget_peak(self) -> None:
        """Lets `peak_kib` begin anew."""
        with open(f"/proc/{self.process.pid}/clear_refs", "w") as refs:
            refs.write("5")

    def read_bytes(self) -> int:
        """Bytes that the process has read from the disk."""
        with open(f"/proc/{self.process.pid}/io") as io:
            return int(dict(line.split(":") for line in io)["read_bytes"])

    def open_files(self) -> int:
        """How many descriptors the process holds."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def terminate(self, seconds: float = 30.0) -> tuple[int | None, float]:
        """SIGTERM, then waits. Exit code (None: it had to be killed) and how many seconds it took."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = None
        seconds = time.monotonic() - start
        if self.group:
            self.group.remove()
        return code, seconds

    def panics(self) -> list[str]:
        """Lines of the log that tell of a panic or an abort."""
        with open(self.log, "rb") as log:
            text = log.read().decode("utf-8", "replace")
        signs = ("panicked at", "ggml_assert", "abort")
        return [line for line in text.splitlines() if any(sign in line.lower() for sign in signs)]


@dataclasses.dataclass
class Answer:
    """What came back for one request."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self):
        """The body as JSON."""
        return json.loads(self.body)

    def error(self) -> dict | None:
        """The `error` object of the body, if that is what it is."""
        try:
            found = self.json().get("error")
        except (ValueError, AttributeError):
            return None
        return found if isinstance(found, dict) else None


class Client:
    """One connection per request, as a load of strangers has it."""

    def __init__(self, server: Server):
        self.server = server

    def head(self, method: str, path: str, length: int | None, headers: dict[str, str] | None = None) -> bytes:
        """Request line and headers."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.server.port}", "Connection: close"]
        if length is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        if self.server.key:
            lines.append(f"Authorization: Bearer {self.server.key}")
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection."""
        return await asyncio.open_connection("127.0.0.1", self.server.port, limit=1 << 20)

    async def request(self, method: str, path: str, body: bytes | None = None, timeout: float = 600.0) -> Answer:
        """One whole request. OSError or TimeoutError when the server does not answer it."""

        async def exchange() -> Answer:
            reader, writer = await self.connect()
            try:
                writer.write(self.head(method, path, None if body is None else len(body)))
                if body:
                    try:
                        writer.write(body)
                        await writer.drain()
                    except OSError:
                        pass  # A body that is too large may be refused before it was sent.
                status, headers = await read_head(reader)
                chunks = [chunk async for chunk in read_body(reader, headers)]
                return Answer(status, headers, b"".join(chunks))
            finally:
                writer.close()

        return await asyncio.wait_for(exchange(), timeout)

    async def post(self, path: str, value, timeout: float = 600.0) -> Answer:
        """POST of a JSON value."""
        return await self.request("POST", path, json.dumps(value).encode(), timeout)

    async def events(self, path: str, value, pause: float = 0.0):
        """The `data:` events of a streamed POST, as (seconds since the epoch of the monotonic clock, text). `pause`
        seconds are slept after each read: a slow reader. Raises Refused when the answer is no stream."""
        body = json.dumps(value).encode()
        reader, writer = await self.connect()
        try:
            writer.write(self.head("POST", path, len(body)) + body)
            await writer.drain()
            status, headers = await read_head(reader)
            if status != 200 or "text/event-stream" not in headers.get("content-type", ""):
                chunks = [chunk async for chunk in read_body(reader, headers)]
                raise Refused(Answer(status, headers, b"".join(chunks)))
            held = b""
            async for chunk in read_body(reader, headers):
                held += chunk
                now = time.monotonic()
                while b"\n\n" in held:
                    event, held = held.split(b"\n\n", 1)
                    for line in event.split(b"\n"):
                        if line.startswith(b"data: "):
                            yield now, line[6:].decode()
                if pause:
                    await asyncio.sleep(pause)
        finally:
            writer.close()


class Refused(Exception):
    """A request for a stream was answered otherwise."""

    def __init__(self, answer: Answer):
        super().__init__(f"{answer.status} {answer.body[:300]!r}")
        self.answer = answer


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers (names in lower case)."""
    first = await reader.readline()
    if not first.startswith(b"HTTP/1."):
        raise ConnectionError(f"no HTTP answer: {first[:80]!r}")
    status = int(first.split()[1])
    headers: dict[str, str] = {}
    while (line := (await reader.readline()).strip()):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return status, headers


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str]):
    """Pieces of a body as they come. ConnectionError when it ends before it is whole."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while True:
            line = await reader.readline()
            if not line:
                raise ConnectionError("the body ended in the middle")
            size = int(line.split(b";")[0], 16)
            piece = await reader.readexactly(size + 2)
            if size == 0:
                return
            yield piece[:-2]
    elif "content-length" in headers:
        left = int(headers["content-length"])
        while left > 0:
            piece = await reader.read(min(left, 1 << 16))
            if not piece:
                raise ConnectionError("the body ended in the middle")
            left -= len(piece)
            yield piece
    else:
        while piece := await reader.read(1 << 16):
            yield piece
