"""A model that says given texts token by token, whatever its prompt is, and the texts of calls that templates write."""

import math
import os
import pathlib
import struct

import attack_files

U32, FLOAT, BOOL = 4, 6, 7
END, BEGIN = 256, 257
# Logits: a text goes on; it ends where a grammar forbids that; a text that a request asks for begins.
NEXT, ENDS, BEGINS = 1000.0, 600.0, 500.0
PIECE_MAX = 16


class Texts:
    """Texts cut into tokens. Each token occurs once in all texts, so that it has one successor. A text may consist of
    parts, and no token crosses from one to the next."""

    def __init__(self, texts):
        self.pieces = []
        seen = set()
        # The first token of each text.
        self.first = {}
        for name, parts in texts.items():
            pieces = [piece for part in parts for piece in cut(part.encode(), seen)]
            if pieces:
                self.first[name] = BEGIN + 1 + len(self.pieces)
                self.pieces += [(piece, at + 1 < len(pieces)) for at, piece in enumerate(pieces)]

    def bias(self, name):
        """The `logit_bias` with which an answer is this text."""
        return {str(self.first[name]): BEGINS}

    def write(self, to: pathlib.Path):
        """Writes a model of the llama architecture. Its one layer adds nothing. Each token's embedding has one
        nonzero dimension, and the output matrix maps this dimension to the next token. The vocabulary has no merges,
        so prompts become single-byte tokens; these share dimension 0."""
        width = -(-(1 + len(self.pieces)) // 64) * 64
        n_tokens = BEGIN + 1 + len(self.pieces)
        ones = struct.pack(f"<{width}f", *[1.0] * width)
        embedding, output = bytearray(4 * width * n_tokens), bytearray(4 * width * n_tokens)

        def put(matrix, token, dimension, value):
            struct.pack_into("<f", matrix, 4 * (token * width + dimension), value)

        for token in range(BEGIN + 1):
            put(embedding, token, 0, 1.0)
        scale = math.sqrt(width)
        # Where a grammar forces another text it is spelled in bytes. White space is allowed in many places.
        unlikely = dict.fromkeys(b" \t\r\n\v\f", -1.0) | dict.fromkeys(range(BEGIN, n_tokens), -2.0)
        for token, value in unlikely.items():
            output[4 * token * width:4 * (token + 1) * width] = struct.pack("<f", value) * width
        for at, (_, goes_on) in enumerate(self.pieces):
            token = BEGIN + 1 + at
            put(embedding, token, 1 + at, 1.0)
            put(output, END, 1 + at, ENDS / scale)
            put(output, token + 1 if goes_on else END, 1 + at, NEXT / scale)
        narrow = bytes(4 * width * 32)
        tensors = {"token_embd.weight": ((width, n_tokens), bytes(embedding)), "output_norm.weight": ((width,), ones),
                   "output.weight": ((width, n_tokens), bytes(output)), "blk.0.attn_norm.weight": ((width,), ones),
                   "blk.0.ffn_norm.weight": ((width,), ones)}
        for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
            tensors[f"blk.0.{name}.weight"] = ((width, 32), narrow)
        for name in ("attn_output", "ffn_down"):
            tensors[f"blk.0.{name}.weight"] = ((32, width), narrow)
        infos, data = b"", b""
        for name, (shape, values) in tensors.items():
            infos += attack_files.text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data))
            data += values
        attack_files.write(to, self.metadata(width), len(tensors), infos, data)

    def metadata(self, width):
        spelling = [spelled(bytes([byte])) for byte in range(256)] + ["</s>", "<s>"]
        spelling += [spelled(piece) for piece, _ in self.pieces]
        kinds = [1] * 256 + [3, 3] + [1] * len(self.pieces)
        number = lambda value: struct.pack("<II", U32, value)
        string = lambda value: struct.pack("<I", attack_files.STRING) + attack_files.text(value)
        array = lambda kind, values: struct.pack("<IIQ", attack_files.ARRAY, kind, len(values)) + b"".join(values)
        return {
            b"general.architecture": string("llama"), b"llama.context_length": number(1 << 15),
            b"llama.embedding_length": number(width), b"llama.block_count": number(1),
            b"llama.feed_forward_length": number(32), b"llama.attention.head_count": number(1),
            b"llama.attention.key_length": number(32), b"llama.attention.value_length": number(32),
            b"llama.rope.dimension_count": number(32),
            b"llama.attention.layer_norm_rms_epsilon": struct.pack("<If", FLOAT, 1e-5),
            b"tokenizer.ggml.model": string("gpt2"), b"tokenizer.ggml.pre": string("gpt-2"),
            b"tokenizer.ggml.tokens": array(attack_files.STRING, [attack_files.text(one) for one in spelling]),
            b"tokenizer.ggml.token_type": array(5, [struct.pack("<i", kind) for kind in kinds]),
            b"tokenizer.ggml.merges": array(attack_files.STRING, []),
            b"tokenizer.ggml.bos_token_id": number(BEGIN), b"tokenizer.ggml.eos_token_id": number(END),
            b"tokenizer.ggml.add_bos_token": struct.pack("<I?", BOOL, False),
        }


def cut(text, seen):
    """Cuts a text into pieces of two bytes or more that are not in `seen`, and adds them; empty if there is no way."""
    pieces, lengths = [], [2]
    at = 0
    while at < len(text):
        length = lengths[-1]
        piece = text[at:at + length]
        if length > PIECE_MAX or len(piece) < length:
            # Makes the piece before longer.
            lengths.pop()
            if not lengths:
                return []
            lengths[-1] += 1
            at -= len(pieces[-1])
            seen.discard(pieces.pop())
        elif piece in seen:
            lengths[-1] += 1
        else:
            seen.add(piece)
            pieces.append(piece)
            at += length
            lengths.append(2)
    return pieces


def spelled(piece):
    """Bytes in the printable letters of byte-level BPE."""
    return "".join(LETTERS[byte] for byte in piece)


def letters():
    shifted = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield chr(byte)
        else:
            yield chr(shifted)
            shifted += 1


LETTERS = list(letters())


def answer(prompt, histories, thought):
    """The text that a template writes for an assistant's message, as the model would say it after `prompt`. `histories`
    are renderings that end with the message, with and without the thought. None if they do not go on from the prompt:
    some templates write another beginning."""
    opened = prompt.rstrip().endswith("<think>")
    for text in histories:
        if text.startswith(prompt) and not (opened and "</think>" not in text[len(prompt):]):
            return text[len(prompt):]
    for text in histories:
        rest = text[len(os.path.commonprefix([prompt, text])):]
        if rest.startswith(thought):
            return rest
    # The template drops reasoning from messages.
    before = prompt.rstrip().removesuffix("<think>")
    for text in histories:
        if opened and text.startswith(before):
            rest = text[len(before):].removeprefix("<think>").lstrip("\n")
            return f"{thought}\n</think>\n\n{rest}"
    return None
