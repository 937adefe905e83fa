"""How large a peer's own cache of experts may be: what the memory limit leaves beside all else that it holds.

As a program, with an adapter's arguments: `cache.py --model MODEL ...` prints MiB; 0 where a cache would be of no use.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

from memory import available

MARGIN_BYTES = 200 << 20
"""For the process, its compute buffers and KV cache, and the page cache."""

HEADER_BYTES_MAX = 256 << 20
"""A header that claims more than this is not read."""

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of metadata's scalars, by type."""


class Header:
    """What is wanted of a GGUF's header."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")
        if self.file.read(4) != b"GGUF":
            raise ValueError(f"{path}: no GGUF")
        self.left = HEADER_BYTES_MAX
        self.number("I")
        n_tensors, n_pairs = self.number("Q"), self.number("Q")
        self.numbers: dict[str, int] = {}
        for _ in range(n_pairs):
            key = self.text()
            value = self.value(self.number("I"))
            if isinstance(value, int):
                self.numbers[key] = value
        tensors = []
        for _ in range(n_tensors):
            name = self.text()
            shape = [self.number("Q") for _ in range(self.number("I"))]
            self.number("I")
            tensors.append((self.number("Q"), name, shape))
        tensors.sort()
        start = self.file.tell()
        start += -start % self.numbers.get("general.alignment", 32)
        ends = [offset for offset, _, _ in tensors[1:]] + [path.stat().st_size - start]
        self.bytes = {name: end - offset for (offset, name, _), end in zip(tensors, ends)}

    def take(self, n: int) -> bytes:
        self.left -= n
        taken = self.file.read(n) if self.left >= 0 else b""
        if len(taken) != n:
            raise ValueError("the header is cut short, or too long")
        return taken

    def number(self, kind: str) -> int:
        return struct.unpack("<" + kind, self.take(struct.calcsize(kind)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self, kind: int) -> int | None:
        if kind == 8:
            self.text()
        elif kind == 9:
            inner, n = self.number("I"), self.number("Q")
            if inner in SIZES:
                self.take(SIZES[inner] * n)
            else:
                for _ in range(n):
                    self.value(inner)
        elif kind in SIZES:
            raw = self.take(SIZES[kind])
            return int.from_bytes(raw, "little") if kind not in (6, 12) else None
        else:
            raise ValueError(f"metadata of type {kind}")
        return None

    def about(self, name: str) -> int:
        """The number of the architecture's with this name."""
        return next((value for key, value in self.numbers.items() if key.split(".", 1)[-1] == name), 0)


def cache_bytes(model: Path, memory: int) -> int:
    """What is left; 0 where that is less than a token uses: a cache of all layers that is used in a cycle never hits
    then."""
    header = Header(model)
    experts = sum(n for name, n in header.bytes.items() if "_exps.weight" in name)
    others = sum(header.bytes.values()) - experts
    left = memory - others - MARGIN_BYTES
    of_token = experts * header.about("expert_used_count") // max(header.about("expert_count"), 1)
    return min(left, experts) if left > of_token else 0


if __name__ == "__main__":
    args = sys.argv[1:]
    print(cache_bytes(Path(args[args.index("--model") + 1]), available()) >> 20)
