#!/usr/bin/env python3
"""Writes a checkpoint as GGUF (architecture "llama" with experts, i.e. Mixtral):
matrices as Q8_0 or F16, norms and routers as F32."""
import argparse, os
import torch
import gguf
import vocabulary
from gguf import GGMLQuantizationType as Q

DESCRIPTION = ("A small Mixtral (8 experts, 2 used) trained from scratch on the King James "
               "Bible and the Python standard library. For demonstrations and tests: it "
               "completes text in the manner of the two, and knows nothing. Texts: Debian's "
               "bible-kjv-text 4.38 (public domain) and libpython3.11-stdlib (PSF-2.0).")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--work", required=True)
    ap.add_argument("--name", default="demo")
    ap.add_argument("--type", choices=["q8_0", "f16"], default="q8_0")
    ap.add_argument("--out", required=True)
    a = ap.parse_args()
    ck = torch.load(os.path.join(a.work, a.name + ".pt"), map_location="cpu")
    sd, c = ck["model"], ck["config"]
    wtype, ftype = vocabulary.TYPES[a.type]

    w = gguf.GGUFWriter(a.out, "llama")
    w.add_type(gguf.GGUFType.MODEL)
    w.add_name("hobbit-demo")
    w.add_basename("hobbit-demo")
    w.add_description(DESCRIPTION)
    w.add_license("MIT OR Apache-2.0")
    w.add_tags(["text-generation", "mixture-of-experts", "demo"])
    w.add_languages(["en"])
    w.add_size_label(f"{c['experts']}x1M")
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
    w.add_expert_count(c["experts"])
    w.add_expert_used_count(c["used"])
    vocabulary.write(w, os.path.join(a.work, "tokenizer.json"), c["vocab"])

    def add(name, t, qtype=wtype):
        vocabulary.add(w, name, t.numpy(), qtype)

    add("token_embd.weight", sd["embd"])
    add("output_norm.weight", sd["norm"], Q.F32)
    for i in range(c["layers"]):
        p, o = f"blocks.{i}.", f"blk.{i}."
        q, k, v = sd[p + "qkv"].split((c["heads"] * c["head_dim"],
                                       c["kv_heads"] * c["head_dim"],
                                       c["kv_heads"] * c["head_dim"]))
        gate, up = sd[p + "experts.gate_up"].split(c["ff"], 1)
        add(o + "attn_norm.weight", sd[p + "attn_norm"], Q.F32)
        add(o + "attn_q.weight", q)
        add(o + "attn_k.weight", k)
        add(o + "attn_v.weight", v)
        add(o + "attn_output.weight", sd[p + "out"])
        add(o + "ffn_norm.weight", sd[p + "ffn_norm"], Q.F32)
        add(o + "ffn_gate_inp.weight", sd[p + "experts.gate_inp"], Q.F32)
        add(o + "ffn_gate_exps.weight", gate)
        add(o + "ffn_up_exps.weight", up)
        add(o + "ffn_down_exps.weight", sd[p + "experts.down"])
    vocabulary.finish(w)
    print(f"{a.out}: {os.path.getsize(a.out)} bytes, {a.type}, after {ck['step']} steps, "
          f"{ck['tokens']} tokens, {ck['seconds']:.0f} s")


if __name__ == "__main__":
    main()
