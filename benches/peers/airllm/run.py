"""AirLLM: one layer in memory at a time, each read for each token; on the CPU.

The weights are those that transformers/convert made of the GGUF file. The first run divides them by layers.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from adapter import Clock, fail, guarded, report, task
from arrivals import Arrivals
from converted import directory


def main() -> None:
    job = task()
    weights = directory(job.model)
    if not (weights / "model.safetensors.index.json").is_file():
        fail(f"{job.model} is not converted: run benches/peers/transformers/convert {job.model}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    clock = Clock()
    import airllm
    import torch

    torch.set_num_threads(job.threads)
    model = airllm.AutoModel.from_pretrained(
        str(weights),
        device="cpu",
        dtype=torch.bfloat16,
        max_seq_len=job.context_unseen(),
        layer_shards_saving_path=str(Path(os.environ["AIRLLM_HOME"]) / "models" / weights.name),
        prefetching=False,
    )
    prompt = model.tokenizer(job.prompt, return_tensors="pt")["input_ids"]
    clock.load_done()

    with torch.inference_mode():
        answer = model.generate(
            prompt,
            max_new_tokens=job.predict,
            min_new_tokens=job.predict,
            do_sample=False,
            use_cache=True,
            streamer=Arrivals(clock),
        )
    tokens = answer[0][prompt.shape[1] :].tolist()
    report(
        "airllm",
        f"{version('airllm')}, transformers {version('transformers')}, torch {torch.__version__}",
        f"bfloat16 from safetensors (not the GGUF's bytes), device=cpu prefetching=False threads={job.threads}",
        job,
        clock,
        prompt_tokens=prompt.shape[1],
        text=model.tokenizer.decode(tokens),
        tokens=tokens,
    )


if __name__ == "__main__":
    guarded(main)
