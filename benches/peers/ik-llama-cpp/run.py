"""ik_llama.cpp, the fork, through ik-llama-cpp-python.

Its own `generate` evaluates the last token, too, and samples in Python token by token; here neither, as elsewhere.
"""

from __future__ import annotations

from importlib.metadata import version

from adapter import Clock, guarded, report, task
from memory import threads_for


def main() -> None:
    job = task()
    clock = Clock()
    import numpy
    from ik_llama_cpp import _ctypes_api as api
    from ik_llama_cpp import _internals as ik

    threads = threads_for(job.model, job.threads)
    model = ik.IkModel(str(job.model), use_mmap=True, n_gpu_layers=0)
    prompt = model.tokenize(job.prompt, add_bos=True)
    context = ik.IkContext(model, n_ctx=job.context_for(len(prompt)), n_threads=threads)
    ends = [token for token in range(model.n_vocab) if api.llama_token_is_eog(model.model, token)]
    clock.load_done()

    def evaluate(tokens: list[int], position: int) -> int:
        """The token that is likeliest to follow, other than one that ends a text."""
        batch = ik.make_batch_range(tokens, pos_start=position)
        code = context.decode(batch)
        api.llama_batch_free(batch)
        if code != 0:
            raise RuntimeError(f"llama_decode answers {code}")
        logits = numpy.ctypeslib.as_array(context.get_logits(-1), (model.n_vocab,))
        logits[ends] = -numpy.inf
        return int(numpy.argmax(logits))

    step = context._n_ubatch
    for position in range(0, len(prompt), step):
        token = evaluate(prompt[position : position + step], position)
    clock.token()
    tokens = [token]
    while len(tokens) < job.predict:
        token = evaluate([token], len(prompt) + len(tokens) - 1)
        clock.token()
        tokens.append(token)
    report(
        "ik-llama-cpp",
        version("ik-llama-cpp-python"),
        f"n_threads={threads} use_mmap=True flash_attn=True",
        job,
        clock,
        prompt_tokens=len(prompt),
        text=model.detokenize(tokens),
        tokens=tokens,
    )


if __name__ == "__main__":
    guarded(main)
