"""Runs of the quality bench: hobbit-perplexity on windows of a text, and on questions about it.

The exact model's log-probabilities are kept in a base file (`--kl-divergence-base`), against which every arm is
compared. A base file holds the text's tokens, too, and `--kl-divergence` reads the tokens from there. That is how
questions are asked: their base file has the tokens of each possible answer as a chunk, and rows of zeros.

A question is: which of four texts goes on from here? Of a chunk the first half is context, and the tokens after it are
the continuation; the right one must have the largest summed log-probability.
"""

import array
import dataclasses
import json
import math
import pathlib
import random
import struct

from quality_arms import Arm, Subject, named, run

# Tokens of a window. The second half is scored, as llama-perplexity does.
WINDOW = 512
# Tokens of a question's context with one continuation, which is the second half.
QUESTION = 48
CONTINUATIONS = 4
SEED = 16
HEAD = struct.Struct("<8s3i")


@dataclasses.dataclass
class Text:
    """A text, the exact model's log-probabilities over it, and the questions about it with their right answers."""

    name: str
    base: pathlib.Path
    n_windows: int
    questions: pathlib.Path | None
    golds: list[int]


@dataclasses.dataclass
class Found:
    """What a run found: hobbit-perplexity's result and counters, and whether each question was answered rightly."""

    result: dict
    stats: dict
    answers: list[bool]


def n_scored(n_ctx: int) -> int:
    """Tokens of a chunk that are scored."""
    return n_ctx - 1 - n_ctx // 2


def read_base(path: pathlib.Path) -> tuple[int, array.array]:
    """The size of the vocabulary and the tokens of a base file."""
    with path.open("rb") as file:
        _, n_ctx, n_vocab, n_chunk = HEAD.unpack(file.read(HEAD.size))
        tokens = array.array("i")
        tokens.fromfile(file, n_ctx * n_chunk)
    return n_vocab, tokens


def write_base(path: pathlib.Path, n_vocab: int, chunks: list[array.array]) -> None:
    """A base file whose rows are zeros, and take no room on the disk."""
    row_bytes = 2 * ((n_vocab + 1) // 2 * 2 + 4)
    with path.open("wb") as file:
        file.write(HEAD.pack(b"_logits_", len(chunks[0]), n_vocab, len(chunks)))
        for chunk in chunks:
            chunk.tofile(file)
        file.truncate(file.tell() + row_bytes * n_scored(len(chunks[0])) * len(chunks))


def questions(tokens: array.array, n: int, seed: int) -> tuple[list[array.array], list[int]]:
    """At most `n` questions: four chunks for each, and the number of the right one. Wrong continuations are drawn from
    elsewhere in the text. The same tokens and seed give the same questions."""
    length = n_scored(QUESTION)
    before = QUESTION - length
    places = range(before, len(tokens) - length + 1, length)
    draw = random.Random(seed)
    chunks, golds = [], []
    for place in sorted(draw.sample(places, min(n, len(places)))):
        own = tokens[place : place + length]
        # No other continuation repeats what the context says.
        others = [at for at in places if at + length <= place - before or at >= place + length]
        endings: list[array.array] = [own]
        for at in draw.sample(others, len(others)):
            ending = tokens[at : at + length]
            if ending not in endings:
                endings.append(ending)
            if len(endings) == CONTINUATIONS:
                break
        gold = draw.randrange(CONTINUATIONS)
        if len(endings) == CONTINUATIONS:
            endings[0], endings[gold] = endings[gold], endings[0]
            chunks += [tokens[place - before : place] + ending for ending in endings]
            golds.append(gold)
    return chunks, golds


def answers(ppl_after_chunk: list[float | None], golds: list[int]) -> list[bool]:
    """Which questions were answered rightly. The perplexities are cumulative: their differences are the chunks'."""
    sums = [math.nan if ppl is None else i * math.log(ppl) for i, ppl in enumerate(ppl_after_chunk, 1)]
    losses = [after - before for before, after in zip([0.0, *sums], sums)]
    of_question = [losses[i : i + CONTINUATIONS] for i in range(0, len(losses), CONTINUATIONS)]
    # A loss that is no number is at most nothing: such an answer is wrong.
    return [all(losses[gold] <= other for other in losses) for losses, gold in zip(of_question, golds)]


@dataclasses.dataclass
class Runner:
    """Runs hobbit-perplexity. Nothing depends on time: every arm runs with --deterministic."""

    programs: pathlib.Path
    subject: Subject
    directory: pathlib.Path
    whole_windows: bool
    threads: int

    def perplexity(self, arm: Arm | None, cache_bytes: int, base: pathlib.Path, *words) -> dict:
        """A run, and its JSON. Without an arm it is the exact model's."""
        # The expert cache limits, and never the budget.
        budget = (16 << 30) + 2 * self.subject.file_bytes
        flags = ["--mem-budget", budget, "--expert-cache", cache_bytes, "--deterministic", "-ngl", "0"]
        flags += ["-t", self.threads, "--no-warmup", "--quiet", "-c", WINDOW, "-b", WINDOW]
        # One token at a time, as in a generation: the tokens of a wide batch share what they miss.
        flags += ["-ub", WINDOW if self.whole_windows else 1, "--json", "-", "--kl-divergence-base", base]
        if arm:
            flags += ["--low", arm.low_path] if arm.low_path else []
            flags += arm.words
        path = arm.path if arm else self.subject.path
        said = run([self.programs / "hobbit-perplexity", "-m", path, *flags, *words])
        return json.loads(said[said.index("\n{") :])

    def text(self, path: pathlib.Path, name: str, n_windows: int | None, n_questions: int) -> Text:
        """Reads a text with the exact model."""
        base, asked = self.directory / f"{name}.base", self.directory / f"{name}.questions"
        chunks = ["--chunks", n_windows] if n_windows else []
        self.perplexity(None, self.subject.expert_bytes, base, "-f", path, *chunks)
        n_vocab, tokens = read_base(base)
        found, golds = questions(tokens, n_questions, SEED)
        if found:
            write_base(asked, n_vocab, found)
        return Text(name, base, len(tokens) // WINDOW, asked if found else None, golds)

    def measure(self, text: Text, arm: Arm, cache_bytes: int) -> Found:
        """Runs an arm on a text, and on the questions about it."""
        with named(f"arm '{arm.name}'"):
            found = self.perplexity(arm, cache_bytes, text.base, "--kl-divergence")
            right = []
            if text.questions:
                asked = self.perplexity(arm, cache_bytes, text.questions, "--kl-divergence")
                right = answers(asked["result"]["ppl_after_chunk"], text.golds)
            return Found(found["result"], found["total"], right)
