"""gpt4all: its own model loader on a llama.cpp of 2024."""

from __future__ import annotations

from importlib.metadata import version

from adapter import Clock, fail, guarded, report, task
from memory import threads_for


def main() -> None:
    job = task()
    clock = Clock()
    from gpt4all import GPT4All

    threads = threads_for(job.model, job.threads)
    model = GPT4All(
        job.model.name,
        model_path=job.model.parent,
        allow_download=False,
        device="cpu",
        n_threads=threads,
        n_ctx=job.context_unseen(),
    )
    clock.load_done()

    prompt: list[int] = []
    tokens: list[int] = []
    pieces: list[bytes] = []

    def on_token(token: int, piece: str) -> bool:
        clock.token()
        tokens.append(token)
        pieces.append(piece.encode())
        return True

    def on_prompt(token: int) -> bool:
        # After its answer it evaluates the end of a template.
        if not tokens:
            prompt.append(token)
        return True

    model.model._prompt_callback = on_prompt
    model.generate(
        job.prompt, max_tokens=job.predict, temp=0.0, top_k=1, repeat_penalty=1.0, n_batch=512, callback=on_token
    )
    if not tokens:
        fail("no token generated")
    command = f"n_threads={threads} n_batch=512 top_k=1 repeat_penalty=1"
    text = b"".join(pieces).decode()
    report("gpt4all", version("gpt4all"), command, job, clock, prompt_tokens=len(prompt), text=text, tokens=tokens)


if __name__ == "__main__":
    guarded(main)
