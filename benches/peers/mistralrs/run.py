"""mistral.rs: Rust, on candle's tensors. The file's own tokenizer and configuration; nothing is fetched."""

from __future__ import annotations

import os
from importlib.metadata import version

from adapter import Clock, guarded, report, task


def main() -> None:
    job = task()
    os.environ["RAYON_NUM_THREADS"] = str(job.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    clock = Clock()
    import mistralrs

    which = mistralrs.Which.GGUF(str(job.model.parent), job.model.name)
    runner = mistralrs.Runner(which, max_seqs=1, prefix_cache_n=0, token_source="none")
    clock.load_done()

    request = mistralrs.CompletionRequest(
        prompt=job.prompt,
        model="default",
        max_tokens=job.predict,
        temperature=0.0,
        top_k=1,
        ignore_eos=True,
    )
    answer = runner.send_completion_request(request)
    usage = answer.usage
    clock.told(int(usage.total_prompt_time_sec * 1e9), int(usage.total_completion_time_sec * 1e9))
    report(
        "mistralrs",
        version("mistralrs"),
        f"GGUF RAYON_NUM_THREADS={job.threads} max_seqs=1 prefix_cache_n=0",
        job,
        clock,
        prompt_tokens=usage.prompt_tokens,
        text=answer.choices[0].text,
        generated=usage.completion_tokens,
    )


if __name__ == "__main__":
    guarded(main)
