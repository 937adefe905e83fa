"""Model files with other metadata, and adapters: just enough of the GGUF format for attacks with hostile files."""

import pathlib
import struct

STRING, ARRAY = 8, 9
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
ALIGNMENT = 32
F32 = 0


def text(value: str | bytes) -> bytes:
    """A string as GGUF has it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


class Gguf:
    """A file's metadata as raw values by key, and its tensors' names, shapes and the bytes that describe them."""

    def __init__(self, path: str | pathlib.Path):
        self.raw = pathlib.Path(path).read_bytes()
        magic, version, n_tensors, n_keys = struct.unpack_from("<4sIQQ", self.raw)
        assert magic == b"GGUF" and version == 3, f"{path}: no GGUF file of version 3"
        self.at = 24
        self.values: dict[bytes, bytes] = {}
        for _ in range(n_keys):
            key = self.string()
            start = self.at
            self.skip(self.number("<I"))
            self.values[key] = self.raw[start : self.at]
        start = self.at
        self.shapes: dict[str, tuple[int, ...]] = {}
        # Where tensors begin, from the start of the data.
        self.offsets: dict[str, int] = {}
        for _ in range(n_tensors):
            name = self.string().decode()
            self.shapes[name] = tuple(self.number("<Q") for _ in range(self.number("<I")))
            self.at += 4
            self.offsets[name] = self.number("<Q")
        self.infos = self.raw[start : self.at]
        self.data = self.raw[-(-self.at // ALIGNMENT) * ALIGNMENT :]

    def number(self, form: str) -> int:
        """The next number."""
        (value,) = struct.unpack_from(form, self.raw, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> bytes:
        """The next string."""
        length = self.number("<Q")
        self.at += length
        return self.raw[self.at - length : self.at]

    def skip(self, kind: int) -> None:
        """Passes over a value."""
        if kind == STRING:
            self.string()
        elif kind == ARRAY:
            element, count = self.number("<I"), self.number("<Q")
            if element in WIDTHS:
                self.at += count * WIDTHS[element]
            else:
                for _ in range(count):
                    self.skip(element)
        else:
            self.at += WIDTHS[kind]

    def with_strings(self, to: pathlib.Path, changes: dict[str, str]) -> pathlib.Path:
        """The same file with other strings in its metadata."""
        values = self.values | {key.encode(): struct.pack("<I", STRING) + text(value) for key, value in changes.items()}
        write(to, values, len(self.shapes), self.infos, self.data)
        return to

    def lora(self, to: pathlib.Path, rank: int = 4) -> pathlib.Path:
        """An adapter of small numbers for this model's query and value projections."""
        values = {
            b"general.type": struct.pack("<I", STRING) + text("adapter"),
            b"general.architecture": self.values[b"general.architecture"],
            b"adapter.type": struct.pack("<I", STRING) + text("lora"),
            b"adapter.lora.alpha": struct.pack("<If", 6, 8.0),
        }
        infos, data = b"", b""
        for name, shape in self.shapes.items():
            if "attn_q." not in name and "attn_v." not in name:
                continue
            for suffix, dims in ((".lora_a", (shape[0], rank)), (".lora_b", (rank, shape[1]))):
                infos += text(name + suffix) + struct.pack("<IQQIQ", 2, *dims, F32, len(data))
                count = dims[0] * dims[1]
                data += struct.pack(f"<{count}f", *(((7 * i) % 11 - 5) / 100 for i in range(count)))
                data += bytes(-len(data) % ALIGNMENT)
        write(to, values, infos.count(b".lora_"), infos, data)
        return to


def write(to: pathlib.Path, values: dict[bytes, bytes], n_tensors: int, infos: bytes, data: bytes) -> None:
    """A file of these parts."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, n_tensors, len(values))
    header += b"".join(text(key) + value for key, value in values.items()) + infos
    to.write_bytes(header + bytes(-len(header) % ALIGNMENT) + data)
