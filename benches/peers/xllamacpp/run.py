"""xllamacpp: llama.cpp's server, in the process, asked through its native API."""

from __future__ import annotations

from adapter import Clock, guarded, report, task
from memory import threads_for


def main() -> None:
    job = task()
    clock = Clock()
    import xllamacpp

    threads = threads_for(job.model, job.threads)
    params = xllamacpp.CommonParams()
    params.model.path = str(job.model)
    params.n_ctx = job.context_unseen()
    params.n_parallel = 1
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers = 0
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    params.no_extra_bufts = True
    params.warmup = False
    params.cache_ram_mib = 0
    params.n_ctx_checkpoints = 0
    params.fit_params = False
    server = xllamacpp.Server(params)
    clock.load_done()

    pieces: list[str] = []
    timings: dict[str, float] = {}

    def on_event(event: dict) -> None:
        if "choices" not in event:
            raise RuntimeError(str(event))
        if piece := event["choices"][0]["text"]:
            clock.token()
            pieces.append(piece)
        timings.update(event.get("timings") or {})

    request = {
        "prompt": job.prompt,
        "n_predict": job.predict,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
    }
    server.handle_completions(request, on_event)
    if len(pieces) != job.predict:
        # A character of several tokens comes as one piece. The server starts its clock with the first token.
        clock.told(int(timings["prompt_ms"] * 1e6), int(timings["predicted_ms"] * 1e6))
    report(
        "xllamacpp",
        xllamacpp.__version__,
        f"n_threads={threads} load_mode=mmap no_extra_bufts warmup=False cache_ram_mib=0",
        job,
        clock,
        prompt_tokens=int(timings["prompt_n"]),
        text="".join(pieces),
        generated=int(timings["predicted_n"]),
    )


if __name__ == "__main__":
    guarded(main)
