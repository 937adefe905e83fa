#!/usr/bin/env python3
"""Writes weights in parts (checkpoint.py) as GGUF, architecture "deepseek" (DeepSeekMoE with a shared expert and
without a dense layer) or, without experts, "llama": matrices as Q8_0 or F16, norms and routers as F32."""
import argparse, os, sys
import gguf
from gguf import GGMLQuantizationType as Q
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "demo-model"))
import checkpoint, vocabulary

LIMIT = 28 << 20  # bytes, for the file that is in the repository
TEXTS = "Texts and licences: models/README.md."
MOE = ("A small DeepSeekMoE ({layers} layers of {experts} experts, {used} used, and a shared one) trained from scratch on "
       "prose, code, technical documentation and dialogue from packages of Debian 12. For measurements and tests: it "
       "completes text in the manner of these, and knows nothing. " + TEXTS)
DRAFT = ("A small dense Llama with the vocabulary of hobbit-fine, trained to guess what that model says next, on the "
         "same texts. For speculative decoding. " + TEXTS)
# by --model of train.py: the name, the size label (experts x the weights of one in all layers) and what it is
ABOUT = dict(fine=("hobbit-fine", "32x0.8M", MOE), deep=("hobbit-deep", "32x0.7M", MOE),
             draft=("hobbit-fine-draft", "1.2M", DRAFT))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--parts", required=True, help="folder with weights.json and weights.0, ...")
    ap.add_argument("--work", required=True, help="folder with tokenizer.json")
    ap.add_argument("--type", choices=["q8_0", "f16"], default="q8_0")
    ap.add_argument("--out", required=True)
    a = ap.parse_args()
    sd, about = checkpoint.load(a.parts)
    c = about["config"]
    wtype, ftype = vocabulary.TYPES[a.type]

    experts = c["experts"]
    name, size, description = ABOUT[about["args"]["model"]]
    w = gguf.GGUFWriter(a.out, "deepseek" if experts else "llama")
    w.add_type(gguf.GGUFType.MODEL)
    w.add_name(name)
    w.add_basename(name)
    w.add_description(description.format(**c))
    w.add_license("MIT")
    w.add_tags(["text-generation", "mixture-of-experts" if experts else "draft", "demo"])
    w.add_languages(["en"])
    w.add_size_label(size)
    w.add_file_type(ftype)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_context_length(c["ctx"])
    w.add_embedding_length(c["dim"])
    w.add_block_count(c["layers"])
    w.add_feed_forward_length(c["ff"])
    w.add_head_count(c["heads"])
    w.add_head_count_kv(c["kv_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_rope_dimension_count(c["head_dim"])
    w.add_rope_freq_base(c["rope_base"])
    w.add_layer_norm_rms_eps(c["eps"])
    if experts:
        w.add_leading_dense_block_count(0)
        w.add_expert_feed_forward_length(c["ff"])
        w.add_expert_count(experts)
        w.add_expert_used_count(c["used"])
        w.add_expert_shared_count(c["shared"])
        w.add_expert_weights_scale(1.0)
    vocabulary.write(w, os.path.join(a.work, "tokenizer.json"), c["vocab"])

    def add(name, t, qtype=wtype):
        vocabulary.add(w, name, t, qtype)

    add("token_embd.weight", sd["embd"])
    add("output_norm.weight", sd["norm"], Q.F32)
    q, kv, ff, sh = c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"], c["ff"], c["ff"] * c["shared"]
    for i in range(c["layers"]):
        p, e, o = f"blocks.{i}.", f"blocks.{i}.experts.", f"blk.{i}."
        qkv, shared, ending = sd[p + "qkv"], sd[e + "shared_gate_up"], "_shexp.weight" if experts else ".weight"
        add(o + "attn_norm.weight", sd[p + "attn_norm"], Q.F32)
        add(o + "attn_q.weight", qkv[:q])
        add(o + "attn_k.weight", qkv[q:q + kv])
        add(o + "attn_v.weight", qkv[q + kv:])
        add(o + "attn_output.weight", sd[p + "out"])
        add(o + "ffn_norm.weight", sd[p + "ffn_norm"], Q.F32)
        if experts:
            wide = sd[e + "gate_up"]
            add(o + "ffn_gate_inp.weight", sd[e + "gate_inp"], Q.F32)
            add(o + "ffn_gate_exps.weight", wide[:, :ff])
            add(o + "ffn_up_exps.weight", wide[:, ff:])
            add(o + "ffn_down_exps.weight", sd[e + "down"])
        add(o + "ffn_gate" + ending, shared[:sh])
        add(o + "ffn_up" + ending, shared[sh:])
        add(o + "ffn_down" + ending, sd[e + "shared_down"])
    vocabulary.finish(w)
    size = os.path.getsize(a.out)
    print(f"{a.out}: {size} bytes, {a.type}, after {about['step']} steps, {about['tokens']} tokens, "
          f"{about['seconds']:.0f} s")
    if a.type == "q8_0" and size > LIMIT:
        raise SystemExit(f"{a.out}: {size} bytes, and at most {LIMIT} are wanted: a smaller vocabulary")


if __name__ == "__main__":
    main()
