"""What every adapter in Python has in common: the arguments, the clock of tokens, the line of JSON at the end."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

MARGIN = 8
"""Tokens of context beyond prompt and answer; some tools refuse a context that is full to the last token."""


@dataclass
class Task:
    """What to run: a model, a text, the number of tokens to generate."""

    model: Path
    prompt: str
    predict: int
    threads: int
    context: int | None

    def context_for(self, n_prompt: int) -> int:
        """The context in tokens: as asked for, or just enough."""
        return self.context or n_prompt + self.predict + MARGIN

    def context_unseen(self) -> int:
        """The same before the prompt's tokens are counted: a token stands for at least a byte."""
        return self.context_for(len(self.prompt.encode()))


def task() -> Task:
    """The task from the command line, the same for each peer."""
    parser = argparse.ArgumentParser(description="Runs one prompt through a peer; see benches/peers/README.md.")
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--prompt-file", type=Path, required=True, help="text to evaluate, as it is")
    parser.add_argument("--predict", type=int, required=True, help="tokens to generate, greedily")
    parser.add_argument("--threads", type=int, required=True, help="threads for computing")
    parser.add_argument("--context", type=int, help="tokens of context [default: just enough]")
    args = parser.parse_args()
    if not args.model.is_file():
        fail(f"no model {args.model}")
    if args.predict < 1:
        fail(f"--predict {args.predict}: expected 1 or more")
    prompt = args.prompt_file.read_bytes().decode()
    return Task(args.model.resolve(), prompt, args.predict, args.threads, args.context)


def fail(message: str) -> None:
    """Ends the adapter: the tool cannot do it."""
    print(f"{Path(sys.argv[0]).parent.name}: {message}", file=sys.stderr)
    sys.exit(1)


@dataclass
class Clock:
    """When the model was loaded, and when each generated token was known, in ns.

    The prompt's evaluation yields the first token; each later one takes an evaluation of the one before. So N tokens
    are N - 1 evaluations in `decode_ns`; the last token is never evaluated.
    """

    begun: int = field(default_factory=time.monotonic_ns)
    loaded: int = 0
    prompted: int = 0
    arrivals: list[int] = field(default_factory=list)
    sums: tuple[int, int] | None = None

    def load_done(self) -> None:
        self.loaded = self.prompted = time.monotonic_ns()

    def prompt_begins(self) -> None:
        """For tools that do something between loading and evaluating."""
        self.prompted = time.monotonic_ns()

    def token(self) -> None:
        self.arrivals.append(time.monotonic_ns())

    def told(self, prompt_ns: int, decode_ns: int) -> None:
        """For tools that only tell both sums: no times of single tokens."""
        self.sums = prompt_ns, decode_ns

    def as_json(self, predict: int) -> dict[str, object]:
        """The times; the number of arrivals is `predict`, unless sums were told."""
        if self.sums is not None:
            prompt_ns, decode_ns = self.sums
            load_ns = self.loaded - self.begun
            return {"load_ns": load_ns, "prompt_ns": prompt_ns, "decode_tokens": predict - 1, "decode_ns": decode_ns}
        gaps = [after - before for before, after in zip(self.arrivals, self.arrivals[1:])]
        return {
            "load_ns": self.loaded - self.begun,
            "prompt_ns": self.arrivals[0] - self.prompted,
            "decode_tokens": len(gaps),
            "decode_ns": self.arrivals[-1] - self.arrivals[0],
            "token_ns": gaps,
        }


def report(
    engine: str,
    version: str,
    command: str,
    task: Task,
    clock: Clock,
    *,
    prompt_tokens: int,
    text: str,
    tokens: list[int] | None = None,
    generated: int | None = None,
) -> None:
    """Prints the result; ends with an error if the tool generated another number of tokens than asked for.

    `generated` is what the tool says; without it, each arrival on the clock is a token.
    """
    generated = len(clock.arrivals) if generated is None else generated
    if generated != task.predict:
        fail(f"{generated} tokens generated, expected {task.predict}")
    result: dict[str, object] = {"engine": engine, "version": version, "command": command}
    result |= clock.as_json(task.predict)
    result |= {"prompt_tokens": prompt_tokens, "text": text}
    if tokens is not None:
        result["tokens"] = tokens
    print(json.dumps(result), flush=True)


def guarded(main: Callable[[], None]) -> None:
    """Runs an adapter; what its tool raises becomes one line and an exit status."""
    try:
        main()
    except Exception as error:  # whatever a tool raises, it could not do it
        fail(f"{type(error).__name__}: {error}")
