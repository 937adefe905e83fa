"""Makes of a GGUF file what transformers can offload to disk: safetensors in bfloat16, under transformers' names.

transformers reads GGUF itself, but all of it into memory, as floats; and of its experts only qwen3moe's, if they are as
wide as its default. So these are not the same bytes: twice as many as of q8_0, and rounded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import gguf
import torch
from converted import directory
from safetensors.torch import save_file
from transformers import AutoTokenizer

Tensors = dict[str, torch.Tensor]

OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
NORMS_OF_HEADS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


class Model:
    """The GGUF file's metadata and weights."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.arch = self.reader.get_field("general.architecture").contents()

    def number(self, name: str) -> int | float:
        field = self.reader.get_field(f"{self.arch}.{name}")
        if field is None:
            raise SystemExit(f"the model has no {self.arch}.{name}")
        return field.contents()

    def weight(self, name: str) -> torch.Tensor:
        """`[rows, columns]`, or `[experts, rows, columns]`, as bfloat16."""
        tensor = self.tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return torch.tensor(values, dtype=torch.bfloat16)


def unpermuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """A query or key matrix of arch llama with each head's rows as transformers wants them: halves, not pairs."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def layers(model: Model) -> Iterator[Tensors]:
    """The weights of each layer."""
    is_llama = model.arch == "llama"
    names = IN_LAYER if is_llama else IN_LAYER | NORMS_OF_HEADS
    heads = {"q": int(model.number("attention.head_count")), "k": int(model.number("attention.head_count_kv"))}
    for layer in range(int(model.number("block_count"))):
        to, source = f"model.layers.{layer}", f"blk.{layer}"
        tensors = {f"{to}.{name}.weight": model.weight(f"{source}.{of}.weight") for name, of in names.items()}
        if is_llama:
            for which, count in heads.items():
                name = f"{to}.self_attn.{which}_proj.weight"
                tensors[name] = unpermuted(tensors[name], count)
        gate_and_up = [model.weight(f"{source}.ffn_{which}_exps.weight") for which in ("gate", "up")]
        tensors[f"{to}.mlp.experts.gate_up_proj"] = torch.cat(gate_and_up, dim=1)
        tensors[f"{to}.mlp.experts.down_proj"] = model.weight(f"{source}.ffn_down_exps.weight")
        yield tensors


def config(model: Model) -> dict[str, object]:
    """transformers' config.json."""
    heads, width = int(model.number("attention.head_count")), int(model.number("embedding_length"))
    key_length = model.reader.get_field(f"{model.arch}.attention.key_length")
    shared = {
        "vocab_size": len(model.tensors["token_embd.weight"].data),
        "hidden_size": width,
        "num_hidden_layers": int(model.number("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(model.number("attention.head_count_kv")),
        "head_dim": int(key_length.contents()) if key_length else width // heads,
        "num_experts_per_tok": int(model.number("expert_used_count")),
        "max_position_embeddings": int(model.number("context_length")),
        "rms_norm_eps": float(model.number("attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(model.number("rope.freq_base"))},
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "dtype": "bfloat16",
    }
    experts = int(model.number("expert_count"))
    expert_width = model.tensors["blk.0.ffn_down_exps.weight"].shape[0]
    if model.arch == "llama":
        return shared | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": experts,
            "intermediate_size": int(expert_width),
            "sliding_window": None,
        }
    return shared | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "moe_intermediate_size": int(expert_width),
        "norm_topk_prob": True,
    }


def main() -> None:
    path = Path(sys.argv[1]).resolve()
    model = Model(path)
    if model.arch not in ("llama", "qwen3moe") or "blk.0.ffn_down_exps.weight" not in model.tensors:
        raise SystemExit(f"{path}: arch {model.arch}; expected llama or qwen3moe, with experts")
    to = directory(path)
    if (to / "model.safetensors.index.json").is_file():
        print(f"{to} is there")
        return
    to.mkdir(parents=True, exist_ok=True)
    (to / "config.json").write_text(json.dumps(config(model), indent=1))

    # The files' names are of the form that other readers of such directories go by.
    files: dict[str, str] = {}
    total = int(model.number("block_count")) + 1
    outside = {name: model.weight(of) for name, of in OUTSIDE.items() if of in model.tensors}
    for number, tensors in enumerate(chain([outside], layers(model)), start=1):
        name = f"model-{number:05}-of-{total:05}.safetensors"
        save_file(tensors, to / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, name))
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(to)
    index = {"metadata": {}, "weight_map": files}
    (to / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    print(to)


if __name__ == "__main__":
    main()
