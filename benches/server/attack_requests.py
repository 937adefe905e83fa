"""Attacks that are whole HTTP requests."""

import asyncio
import json
import random
import time

from attack_bodies import COMPLETION, SHORT, TEXTS, bodies
from mutations import SEEDS, mutated, written
from under_test import Refused

# Stretches of these are what tokenisers split badly.
STRETCHES = {
    "spaces": " ",
    "newlines": "\n",
    "letters": "a",
    "digits": "7",
    "dashes": "-",
    "CJK": "\u4f60",
    "emoji": "\U0001f600",
}


async def tokenise(attack) -> None:
    """Long stretches of one character wherever text becomes tokens."""
    for length in (10_000, 100_000):
        for name, character in STRETCHES.items():
            text = character * length
            for path, body in (
                ("/tokenize", {"content": text}),
                (COMPLETION, SHORT | {"prompt": text}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
                ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}),
            ):
                await attack.send(f"{length:,} {name}", path, body)


async def pre_tokenizer(attack) -> None:
    """The same by a model with another pre-tokenizer, through the shortest way to it."""
    for length in (10_000, 100_000):
        for name, character in STRETCHES.items():
            await attack.send(f"{length:,} {name}", "/tokenize", {"content": character * length})
    await attack.send("140,000 texts", "/tokenize", {"content": ["a"] * 140_000})
    await attack.send("2,048 texts", "/tokenize", {"content": ["a"] * 2_048})
    await attack.send("140,000 parts", COMPLETION, SHORT | {"prompt": [1] + ["a"] * 140_000})
    breakers = [f"e{n:02}zyx" for n in range(64)]
    await attack.send("breakers", COMPLETION, SHORT | {"dry_multiplier": 1, "dry_sequence_breakers": breakers})


async def hostile(attack) -> None:
    """Bodies that are wrong, each in its own way."""
    for name, path, raw in bodies():
        await attack.send(name, path, raw)


async def mutations(attack) -> None:
    """Good bodies with random changes, for a while."""
    end = time.monotonic() + attack.options.mutate
    while time.monotonic() < end:
        method, path, body = attack.rng.choice(SEEDS)
        raw = None if body is None else written(mutated(body, attack.rng), attack.rng)
        await attack.send(f"{raw!r}"[:300], path, raw, method=method)


async def costly(attack) -> None:
    """Small bodies that ask for much, some at the same time."""
    biases = [[n % 4096, 0.5] for n in range(3_000)]
    words = [[f"the {n}", 0.5] for n in range(30_000)]
    many = {
        "256 prompts with 3,000 biases": {"prompt": ["a"] * 256, "n_predict": 1, "logit_bias": biases},
        "256 prompts with 60,000 biases": {"prompt": ["a"] * 256, "n_predict": 1, "logit_bias": biases * 20},
        "256 prompts with 30,000 biases by text": {"prompt": ["a"] * 256, "n_predict": 1, "logit_bias": words},
        "2,000 prompts with 30,000 biases": {"prompt": ["a"] * 2_000, "n_predict": 1, "logit_bias": biases * 10},
        "100,000 prompts": {"prompt": ["a"] * 100_000, "n_predict": 1},
        "256 prompts with a long stop": {"prompt": ["a"] * 256, "n_predict": 1, "stop": ["b" * 100_000]},
        "256 prompts with a long grammar": {
            "prompt": ["a"] * 256,
            "n_predict": 1,
            "grammar": 'root ::= "a"' + " " * 200_000,
        },
        "256 prompts with a long suffix": {"prompt": ["a"] * 256, "max_tokens": 1, "suffix": "and so " * 400_000},
        "100,000 embeddings": {"input": ["a"] * 100_000},
    }
    for name, body in many.items():
        path = "/v1/embeddings" if "input" in body else TEXTS if "suffix" in body else COMPLETION
        await attack.send(name, path, body)
    name = "256 prompts with 30,000 biases by text"
    await asyncio.gather(*(attack.send(f"{name}, 2 at once", COMPLETION, many[name]) for _ in range(2)))
    long = json.dumps({"messages": [{"role": "user", "content": "a "}] * 40_000, "max_tokens": 1})
    await asyncio.gather(
        *(attack.send("40,000 messages, 4 at once", "/v1/chat/completions", long.encode()) for _ in range(4))
    )


async def large(attack) -> None:
    """Bodies as large as are accepted, several at once: they must not all be held in memory."""
    raw = b'{"n_predict":1,"prompt":"' + b"word " * (12 << 20) + b'"}'
    await asyncio.gather(*(attack.send("60 MiB, 8 at once", COMPLETION, raw, may_cut=True) for _ in range(8)))


async def adapters(attack) -> None:
    """Scales of an adapter that overflow what a model computes with."""
    for scale in (1e38, -1e38, 1e10, 1e5):
        body = SHORT | {"lora": [{"id": 0, "scale": scale}], "n_predict": 8}
        await asyncio.gather(*(attack.send(f"scale {scale:g}", COMPLETION, body) for _ in range(4)))
        # The others must not notice: this is the text of the start.
        await attack.same_text(f"after a scale of {scale:g}")
    await attack.send("scale 1e38 for all", "/lora-adapters", [{"id": 0, "scale": 1e38}])
    await attack.send("with the scale for all", COMPLETION, SHORT)
    await attack.send("scale 0 for all", "/lora-adapters", [{"id": 0, "scale": 0.0}])


async def overwriting(attack) -> None:
    """Slots saved under the names of files that are none of the server's."""
    outside = attack.directory / "outside.txt"
    outside.write_text("not the server's")
    model = attack.slots / "model.gguf"
    model.write_bytes(attack.options.model.read_bytes()[: 1 << 20])
    log = attack.slots / "server.log"
    log.write_text("a log\n")
    (attack.slots / "empty").touch()
    link = attack.slots / "link.bin"
    link.unlink(missing_ok=True)
    link.symlink_to(outside)
    guarded = [model, log, outside]
    before = [path.read_bytes() for path in guarded]
    await attack.send("a prompt", COMPLETION, SHORT | {"id_slot": 0})
    for name in (
        "model.gguf",
        "server.log",
        "link.bin",
        "empty",
        "../outside.txt",
        str(outside),
        "sound.bin",
        "sound.bin",
    ):
        answer = await attack.send(f"save as {name}", "/slots/0?action=save", {"filename": name})
        if name == "sound.bin" and answer and answer.status != 200:
            attack.fail(f"a slot cannot be saved to a name of its own: {answer.status} {answer.body[:200]!r}")
    for path, content in zip(guarded, before):
        if path.read_bytes() != content:
            attack.fail(f"saving a slot replaced {path.name}")


async def changed_slots(attack) -> None:
    """A saved slot with changed numbers and, if xxhash is installed, a checksum that fits them."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        xxh3_64_intdigest = None
    text = "In the beginning God created the heaven and the earth."
    await attack.send("a prompt", COMPLETION, SHORT | {"prompt": text, "id_slot": 0})
    await attack.send("save", "/slots/0?action=save", {"filename": "changed.bin"})
    path = attack.slots / "changed.bin"
    saved = path.read_bytes()
    words = (0, 1, 2**32 - 1, 2**31, 0x7E007E00, 0x7C007C00, 0x7F800000, 0xFC00FC00, attack.rng.getrandbits(32))
    for _ in range(100):
        changed = bytearray(saved)
        for _ in range(attack.rng.choice((1, 2, 8))):
            at = attack.rng.randrange(40, len(saved) - 4)
            changed[at : at + 4] = attack.rng.choice(words).to_bytes(4, "little")
        if xxh3_64_intdigest:
            changed[32:40] = xxh3_64_intdigest(bytes(changed[40:])).to_bytes(8, "little")
        path.write_bytes(changed)
        await attack.send("restore", "/slots/0?action=restore", {"filename": path.name})
        await attack.send("the slot goes on", COMPLETION, SHORT | {"prompt": text + " And", "id_slot": 0})
        await attack.send("another slot", COMPLETION, SHORT | {"id_slot": 1})
    await attack.same_text("after changed slots")


async def mix(attack) -> None:
    """Long prompts, candidates, scored prompts, and slots that are saved and restored, all at once."""
    ids = [5 + n % 200 for n in range(450)]
    kinds = (
        (COMPLETION, {"prompt": ids, "n_predict": 8}),
        (COMPLETION, {"prompt": ids[:20], "n_predict": 40, "n_probs": 100}),
        (TEXTS, {"prompt": ids[:200], "max_tokens": 4, "echo": True, "logprobs": 5}),
        ("/slots/0?action=save", {"filename": "mix.bin"}),
        ("/slots/1?action=restore", {"filename": "mix.bin"}),
    )
    for _ in range(3):
        await asyncio.gather(*(attack.send("mix", *kinds[n % len(kinds)]) for n in range(24)))


async def origins(attack) -> None:
    """Pages of other names that point to this address."""
    port = attack.server.port
    for name, headers, refused in (
        ("rebound name", {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}, True),
        ("rebound name without an origin", {"Host": f"evil.example:{port}"}, True),
        ("name that begins like ours", {"Host": f"127.0.0.1.evil.example:{port}"}, True),
        ("name that ends like ours", {"Host": f"evil-localhost:{port}"}, True),
        ("page of another origin", {"Origin": "http://evil.example"}, True),
        ("page of no origin", {"Origin": "null"}, True),
        ("localhost", {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}, False),
        ("IPv6", {"Host": f"[::1]:{port}"}, False),
    ):
        answer = await attack.send(name, COMPLETION, SHORT, headers=headers)
        if answer and refused != (400 <= answer.status < 500):
            attack.fail(f"{name}: {answer.status}, where {'a refusal' if refused else 'an answer'} was expected")


async def shared_context(attack) -> None:
    """Small requests beside two that never end, on the context that they share."""
    over = asyncio.Event()

    async def unlimited(number: int) -> None:
        body = {"prompt": f"{number} And God said", "n_predict": -1, "ignore_eos": True, "stream": True}
        while not over.is_set() and attack.server.alive():
            try:
                async for _ in attack.client.events(COMPLETION, body):
                    if over.is_set():
                        break
            except (OSError, ValueError, Refused, asyncio.IncompleteReadError):
                await asyncio.sleep(0.05)

    holders = [asyncio.create_task(unlimited(number)) for number in range(2)]
    for number in range(40):
        body = {"prompt": f"{number} " + "the earth was without form " * 10, "n_predict": 24, "ignore_eos": True}
        answer = await attack.send("small request beside unlimited ones", COMPLETION, body)
        if answer and answer.status != 200:
            attack.fail(f"a small request was answered with {answer.status}: {answer.body[:200]!r}")
    over.set()
    await asyncio.wait(holders, timeout=10)


async def vanished(attack) -> None:
    """Clients that ask for a stream and are gone, some before its first event."""

    async def one(number: int) -> None:
        rng = random.Random(number)
        body = {"prompt": f"{number} In the beginning", "n_predict": 400, "ignore_eos": True, "stream": True}
        raw = json.dumps(body).encode()
        _, writer = await attack.connect()
        if writer:
            writer.write(attack.client.head("POST", COMPLETION, len(raw)) + raw[: rng.choice([len(raw), len(raw), 20])])
            await asyncio.sleep(rng.choice([0, 0, 0.05, 0.5]))
            writer.transport.abort()

    attack.count(None, 300)
    for first in range(0, 300, 60):
        await asyncio.gather(*(one(number) for number in range(first, first + 60)))
