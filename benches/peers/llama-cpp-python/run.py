"""llama-cpp-python: llama.cpp's library through ctypes.

Tokens are chosen here from the logits: its own sampling has no way to leave out the token that ends a text.
"""

from __future__ import annotations

from collections.abc import Sequence

from adapter import Clock, guarded, report, task
from memory import threads_for


def main() -> None:
    job = task()
    clock = Clock()
    import llama_cpp
    import numpy

    default_params = llama_cpp.llama_cpp.llama_model_default_params

    def params_without_repacking():  # noqa: ANN202 (a ctypes structure)
        """`Llama` has no argument for this: weights in other layouts would be copies."""
        params = default_params()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = params_without_repacking
    threads = threads_for(job.model, job.threads)
    llama = llama_cpp.Llama(
        str(job.model),
        n_ctx=job.context_unseen(),
        n_threads=threads,
        n_threads_batch=threads,
        use_mmap=True,
        verbose=False,
    )
    clock.load_done()

    def evaluate(tokens: Sequence[int]) -> int:
        """The token that is likeliest to follow, other than the one that ends a text."""
        llama.eval(tokens)
        row = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
        logits = numpy.ctypeslib.as_array(row, (llama.n_vocab(),))
        if llama.token_eos() >= 0:
            logits[llama.token_eos()] = -numpy.inf
        return int(numpy.argmax(logits))

    prompt = llama.tokenize(job.prompt.encode())
    clock.prompt_begins()
    tokens = [evaluate(prompt)]
    clock.token()
    while len(tokens) < job.predict:
        tokens.append(evaluate(tokens[-1:]))
        clock.token()
    report(
        "llama-cpp-python",
        llama_cpp.__version__,
        f"n_threads={threads} use_mmap=True use_extra_bufts=False",
        job,
        clock,
        prompt_tokens=len(prompt),
        text=llama.detokenize(tokens, prev_tokens=prompt).decode(errors="replace"),
        tokens=tokens,
    )


if __name__ == "__main__":
    guarded(main)
