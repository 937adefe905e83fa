"""Attacks below whole requests: framing of HTTP/1.1, frames of HTTP/2, clients that are slow or silent."""

import asyncio
import json
import struct
import time

from attack_bodies import COMPLETION

BODY = b'{"prompt":"a","n_predict":1}'
HIDDEN = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def post(*headers: bytes, body: bytes = BODY, first: bytes = b"POST /completion HTTP/1.1") -> bytes:
    """A request with these headers besides Host."""
    return b"\r\n".join([first, b"Host: 127.0.0.1", *headers, b"", b""]) + body


def length(raw: bytes = BODY) -> bytes:
    """Content-Length of a body."""
    return b"Content-Length: %d" % len(raw)


CHUNKED = b"Transfer-Encoding: chunked"

# Name, bytes, answers that may come at most, whether the client ends its side.
PROBES = [
    ("both lengths", post(b"Content-Length: 4", CHUNKED, body=b"0\r\n\r\n" + HIDDEN), 1, False),
    ("both lengths, other order", post(CHUNKED, b"Content-Length: 4", body=b"0\r\n\r\n" + HIDDEN), 1, False),
    ("two lengths that differ", post(length(), b"Content-Length: 3", body=BODY + HIDDEN), 1, False),
    ("list of lengths", post(b"Content-Length: 28, 3", body=BODY + HIDDEN), 1, False),
    ("length with a sign", post(b"Content-Length: +28", body=BODY + HIDDEN), 1, False),
    ("length below zero", post(b"Content-Length: -5"), 1, False),
    ("length beyond 64 bits", post(b"Content-Length: 99999999999999999999"), 1, False),
    ("encoding twice", post(CHUNKED, b"Transfer-Encoding: identity", body=b"0\r\n\r\n" + HIDDEN), 1, False),
    ("encoding with a tab", post(b"Transfer-Encoding:\x0bchunked", length(), body=BODY + HIDDEN), 1, False),
    ("space before the colon", post(b"Content-Length : 28", body=BODY + HIDDEN), 1, False),
    ("folded header", post(b"X: a\r\n b", length()), 1, False),
    ("NUL in a header", post(b"X: a\0b", length()), 1, False),
    ("bare CR in a header", post(b"X: a\rContent-Length: 0", length()), 1, False),
    ("bare LF as line ends", post(length()).replace(b"\r\n", b"\n"), 1, False),
    ("chunk size that is no number", post(CHUNKED, body=b"zz\r\n{}\r\n0\r\n\r\n"), 1, False),
    ("chunk size beyond 64 bits", post(CHUNKED, body=b"fffffffffffffffff\r\n" + BODY), 1, False),
    ("chunk longer than it says", post(CHUNKED, body=b"2\r\n" + BODY + b"\r\n0\r\n\r\n"), 1, False),
    ("chunk extension of 1 MiB", post(CHUNKED, body=b"2;" + b"a" * (1 << 20) + b"\r\n{}\r\n0\r\n\r\n"), 1, False),
    ("trailers of 1 MiB", post(CHUNKED, body=b"2\r\n{}\r\n0\r\n" + b"X: a\r\n" * 170_000 + b"\r\n"), 1, False),
    (
        "absolute address of another host",
        post(length(), first=b"POST http://evil.example/completion HTTP/1.1"),
        1,
        False,
    ),
    ("no host", b"GET /health HTTP/1.1\r\n\r\n", 1, False),
    ("two hosts", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n", 1, False),
    ("header of 1 MiB", post(b"X: " + b"a" * (1 << 20), length()), 1, False),
    ("5,000 headers", post(*[b"X: a"] * 5_000, length()), 1, False),
    ("address of 100 KB", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 1, False),
    ("HTTP/0.9", b"GET /\r\n\r\n", 1, False),
    ("HTTP/9.9", b"GET / HTTP/9.9\r\nHost: a\r\n\r\n", 1, False),
    ("bytes", bytes(range(256)) * 16, 1, False),
    ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(512), 1, False),
    ("end inside the head", b"POST /completion HTTP/1.1\r\nHost: 127", 1, True),
    ("end inside the body", post(b"Content-Length: 1000"), 1, True),
    ("waits to be asked", post(b"Expect: 100-continue", length(), body=b""), 1, False),
    (
        "upgrade to HTTP/2",
        post(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__", length()),
        2,
        False,
    ),
    ("upgrade to a socket", post(b"Connection: Upgrade", b"Upgrade: websocket", length()), 1, False),
    ("1,000 requests in a row", HIDDEN * 1_000, 1_000, False),
    ("method CONNECT", b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n", 1, False),
    ("method TRACE", b"TRACE / HTTP/1.1\r\nHost: a\r\nCookie: secret\r\n\r\n", 1, False),
    ("dots in the path", b"GET /../../../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 1, False),
    (
        "dots in the path, encoded",
        b"GET /%2e%2e/%2e%2e/..%2fetc%2fpasswd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        1,
        False,
    ),
]


async def framing(attack) -> None:
    """Requests whose ends are unclear, and heads that are no heads."""

    async def one(name: str, raw: bytes, most: int, ends: bool) -> None:
        reader, writer = await attack.connect()
        if not writer:
            return
        got = b""
        try:
            writer.write(raw)
            if ends:
                writer.write_eof()
            while piece := await asyncio.wait_for(reader.read(1 << 16), 1.5):
                got += piece
        except (OSError, TimeoutError):
            pass  # Refusing to go on is as good as an answer.
        finally:
            writer.transport.abort()
        statuses = [
            int(line[9:12]) for line in got.split(b"\r\n") if line.startswith(b"HTTP/1.") and line[9:12].isdigit()
        ]
        final = [status for status in statuses if status >= 200]
        attack.count(final[0] if final else None)
        if len(final) > most:
            attack.fail(f"{name}: {len(final)} answers, at most {most} expected: a hidden request was read")
        if any(status >= 500 and status not in (501, 503, 505) for status in final):
            attack.fail(f"{name}: status {final}")
        if b"root:" in got or b"Cookie: secret" in got:
            attack.fail(f"{name}: {got[:200]!r} came back")

    for first in range(0, len(PROBES), 10):
        await asyncio.gather(*(one(*probe) for probe in PROBES[first : first + 10]))


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4
CANCEL = struct.pack(">I", 8)


def frame(kind: int, stream: int = 0, payload: bytes = b"", flags: int = 0, size: int | None = None) -> bytes:
    """A frame of HTTP/2; `size`: the length in its header."""
    return (
        struct.pack(">I", len(payload) if size is None else size)[1:]
        + struct.pack(">BBI", kind, flags, stream)
        + payload
    )


def literal(index: int, value: bytes) -> bytes:
    """A header by its name's place in HPACK's table, not to be remembered. Shorter than 127 bytes."""
    return bytes([index, len(value)]) + value


def asked(method: bytes, path: bytes) -> bytes:
    """The headers of a request."""
    return {b"GET": b"\x82", b"POST": b"\x83"}[method] + b"\x86" + literal(4, path) + literal(1, b"127.0.0.1")


def setting(*pairs: tuple[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", *pair) for pair in pairs))


def streams(count: int, make) -> bytes:
    """The bytes that `make` gives for `count` streams of a client."""
    return b"".join(make(1 + 2 * number) for number in range(count))


def frames() -> list[tuple[str, bytes]]:
    """Names, and the bytes that follow the preface."""
    get, ask = asked(b"GET", b"/health"), asked(b"POST", b"/completion")
    body = json.dumps({"prompt": "a", "n_predict": 400, "ignore_eos": True, "stream": True}).encode()
    start = setting()
    remembered = b"\x40\x01x\x7f\x81\x1e" + b"a" * 4_000  # A header of 4,000 bytes that HPACK remembers as number 62.
    reset = lambda stream: frame(RST_STREAM, stream, CANCEL)
    return [
        ("rapid reset", start + streams(10_000, lambda s: frame(HEADERS, s, get, END_STREAM | END_HEADERS) + reset(s))),
        (
            "rapid reset of completions",
            start
            + streams(
                1_000, lambda s: frame(HEADERS, s, ask, END_HEADERS) + frame(DATA, s, body, END_STREAM) + reset(s)
            ),
        ),
        ("streams that never end", start + streams(2_000, lambda s: frame(HEADERS, s, ask, END_HEADERS))),
        ("continuations", start + frame(HEADERS, 1, get) + frame(CONTINUATION, 1, bytes([0]) * 16_000) * 1_000),
        ("empty continuations", start + frame(HEADERS, 1, get) + frame(CONTINUATION, 1) * 20_000),
        ("header bomb", start + frame(HEADERS, 1, get + remembered + b"\xbe" * 12_000, END_STREAM | END_HEADERS)),
        ("pings", start + frame(PING, payload=bytes(8)) * 20_000),
        ("settings", start * 5_000),
        ("empty data", start + frame(HEADERS, 1, ask, END_HEADERS) + frame(DATA, 1) * 20_000),
        ("priorities", start + streams(10_000, lambda s: frame(PRIORITY, s, struct.pack(">IB", s, 1)))),
        ("windows that overflow", start + frame(WINDOW_UPDATE, payload=struct.pack(">I", 2**31 - 1)) * 2),
        ("window of nothing", start + frame(WINDOW_UPDATE, payload=bytes(4))),
        ("resets of nothing", start + streams(5_000, reset)),
        ("stream 0", start + frame(HEADERS, 0, get, END_HEADERS)),
        ("stream 2", start + frame(HEADERS, 2, get, END_HEADERS)),
        ("frame of 16 MiB", start + frame(DATA, 1, b"a" * 100, size=2**24 - 1)),
        ("unknown frame", start + frame(250, 1, b"a" * 1_000) * 1_000),
        ("no settings", frame(HEADERS, 1, get, END_STREAM | END_HEADERS)),
        ("HPACK of nothing", start + frame(HEADERS, 1, b"\xff" * 1_000, END_HEADERS)),
    ]


async def answered(reader: asyncio.StreamReader) -> bool:
    """Whether headers come back on a connection of HTTP/2."""
    try:
        while True:
            head = await asyncio.wait_for(reader.readexactly(9), 5)
            if head[3] == HEADERS:
                return True
            await reader.readexactly(int.from_bytes(head[:3], "big"))
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False


async def http2(attack) -> None:
    """Frames by hand, of which servers have died or slowed down."""
    reader, writer = await attack.connect()
    if writer:
        # An honest request: without an answer to it, all others would show nothing.
        writer.write(PREFACE + setting() + frame(HEADERS, 1, asked(b"GET", b"/health"), END_STREAM | END_HEADERS))
        if not await answered(reader):
            attack.fail("an honest request by HTTP/2 is not answered")
        writer.transport.abort()
    for name, raw in frames():
        reader, writer = await attack.connect()
        if not writer:
            return

        async def read(reader=reader) -> None:
            """Takes what comes, so that the server is not held up by us."""
            while await reader.read(1 << 16):
                pass

        taking = asyncio.create_task(read())
        try:
            writer.write(PREFACE + raw)
            await asyncio.wait_for(writer.drain(), 10)
            await asyncio.wait({taking}, timeout=0.3)
        except (OSError, TimeoutError):
            pass  # The server has closed the connection, or reads no more of it.
        writer.transport.abort()
        await asyncio.wait({taking}, timeout=1)
        if taking.done() and not taking.cancelled():
            taking.exception()  # A reset is what is expected.
        taking.cancel()
        attack.count(None)
        if not attack.server.alive():
            await attack.died(name)


async def drip(attack, first: bytes, rest: bytes, seconds: float) -> None:
    """Sends the first bytes at once, of the rest one now and then."""
    _, writer = await attack.connect()
    if not writer:
        return
    end, at = time.monotonic() + seconds, 0
    try:
        writer.write(first)
        while time.monotonic() < end and at < len(rest):
            writer.write(rest[at : at + 1])
            at += 1
            await asyncio.sleep(0.2)
    except OSError:
        pass  # The server has lost its patience.
    writer.transport.abort()


async def deaf(attack, seconds: float) -> None:
    """Asks for a stream with much in every event, and never reads."""
    raw = json.dumps(
        {"prompt": "And God said", "n_predict": 1_500, "ignore_eos": True, "stream": True, "n_probs": 100}
    ).encode()
    _, writer = await attack.connect(buffer=4096)
    if writer:
        writer.write(attack.client.head("POST", COMPLETION, len(raw)) + raw)
        await asyncio.sleep(seconds)
        writer.transport.abort()


async def deaf_h2(attack, seconds: float) -> None:
    """The same with a window of HTTP/2 that is never opened."""
    body = json.dumps({"prompt": "And God said", "n_predict": 400, "ignore_eos": True, "stream": True}).encode()
    _, writer = await attack.connect()
    if writer:
        raw = streams(
            8,
            lambda s: frame(HEADERS, s, asked(b"POST", b"/completion"), END_HEADERS) + frame(DATA, s, body, END_STREAM),
        )
        writer.write(PREFACE + setting((4, 0)) + raw)
        await asyncio.sleep(seconds)
        writer.transport.abort()


async def slow(attack) -> None:
    """Heads and bodies a byte at a time, streams that are not read."""
    seconds = attack.options.hold
    head = post(b"Content-Length: 1000", body=b" " * 1_000)
    clients = [drip(attack, b"", head, seconds) for _ in range(100)]
    clients += [drip(attack, head[:-1_000], head[-1_000:], seconds) for _ in range(50)]
    clients += [deaf(attack, seconds) for _ in range(6)] + [deaf_h2(attack, seconds) for _ in range(2)]
    attack.count(None, len(clients))
    await asyncio.gather(*clients)


async def silent(attack) -> None:
    """More connections than the server may have files, of which none says a word."""
    opened = []
    for number in range(attack.group.open_files + 100):
        _, writer = await attack.connect(timeout=1)
        if writer:
            if number % 10 == 0:
                writer.write(PREFACE + setting())
            opened.append(writer)
    attack.count(None, len(opened))
    await asyncio.sleep(1)
    await attack.same_text("while silent connections are open", timeout=10)
    for writer in opened:
        writer.transport.abort()


async def left_alone(attack) -> None:
    """Connections that say nothing, half a head, or nothing after an answer, and streams that are not read: the server
    must end them by itself."""
    kinds = {
        "nothing": b"",
        "half a head": b"GET /health HT",
        "nothing after an answer": HIDDEN,
        "HTTP/2": PREFACE + setting(),
    }
    limit = attack.options.idle_limit

    async def one(name: str, raw: bytes) -> None:
        reader, writer = await attack.connect()
        if not writer:
            return
        start = time.monotonic()
        writer.write(raw)
        try:
            while await asyncio.wait_for(reader.read(1 << 16), limit - (time.monotonic() - start)):
                pass
        except TimeoutError:
            attack.fail(f"{name}: still open after {limit:.0f} s")
        except OSError:
            pass
        writer.transport.abort()
        attack.count(None)

    unread = [asyncio.create_task(deaf(attack, limit + 4)) for _ in range(6)]
    end = time.monotonic() + limit + 2
    await asyncio.gather(*(one(*kind) for kind in kinds.items() for _ in range(5)))
    await asyncio.sleep(max(0.0, end - time.monotonic()))
    # An end of the server's side may wait behind data that is not read: its files tell whether it has let go.
    open_files = attack.server.open_files() - attack.files
    if open_files > 3:
        attack.fail(f"streams that are not read: {open_files} files are still open after {limit:.0f} s")
    await asyncio.gather(*unread)
