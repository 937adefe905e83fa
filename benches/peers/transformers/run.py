"""transformers with accelerate: layers that fit stay in memory, the others are read for each token.

The weights and the tokenizer are those that `convert` made of the GGUF file.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from tempfile import TemporaryDirectory

from adapter import Clock, fail, guarded, report, task
from arrivals import Arrivals
from converted import directory
from memory import available

GIB = 1 << 30
BESIDE_WEIGHTS = int(1.5 * GIB)
"""Memory for PyTorch, activations, and the layers on their way through."""


def main() -> None:
    job = task()
    weights = directory(job.model)
    if not (weights / "model.safetensors.index.json").is_file():
        fail(f"{job.model} is not converted: run benches/peers/transformers/convert {job.model}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    clock = Clock()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(job.threads)
    memory = max(0, available() - BESIDE_WEIGHTS)
    with TemporaryDirectory() as scratch:
        tokenizer = AutoTokenizer.from_pretrained(weights)
        model = AutoModelForCausalLM.from_pretrained(
            weights, dtype=torch.bfloat16, device_map="auto", max_memory={"cpu": memory}, offload_folder=scratch
        )
        prompt = tokenizer(job.prompt, return_tensors="pt")
        n_prompt = prompt["input_ids"].shape[1]
        clock.load_done()

        with torch.inference_mode():
            answer = model.generate(
                **prompt,
                max_new_tokens=job.predict,
                min_new_tokens=job.predict,
                do_sample=False,
                streamer=Arrivals(clock),
            )
    tokens = answer[0][n_prompt:].tolist()
    offloaded = sum(place == "disk" for place in getattr(model, "hf_device_map", {}).values())
    report(
        "transformers",
        f"{version('transformers')}, accelerate {version('accelerate')}, torch {torch.__version__}",
        f"bfloat16 from safetensors (not the GGUF's bytes), device_map=auto, {memory / GIB:.1f} GiB of weights in "
        f"memory, {offloaded} modules on disk, threads={job.threads}",
        job,
        clock,
        prompt_tokens=n_prompt,
        text=tokenizer.decode(tokens),
        tokens=tokens,
    )


if __name__ == "__main__":
    guarded(main)
