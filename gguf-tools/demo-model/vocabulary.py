"""What every model trained here writes into its GGUF: the tokenizer's keys, and matrices in a type."""
import json
import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q, LlamaFileType

TYPES = {"q8_0": (Q.Q8_0, LlamaFileType.MOSTLY_Q8_0), "f16": (Q.F16, LlamaFileType.MOSTLY_F16)}


def write(w, tokenizer_json, size):
    """tokenizer.json's vocabulary and merges; token 0 begins a text and ends a document."""
    tok = json.load(open(tokenizer_json))
    tokens = [t for t, _ in sorted(tok["model"]["vocab"].items(), key=lambda kv: kv[1])]
    assert len(tokens) == size and tokens[0] == "<|endoftext|>"
    merges = [m if isinstance(m, str) else " ".join(m) for m in tok["model"]["merges"]]
    w.add_vocab_size(size)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1))
    w.add_token_merges(merges)
    w.add_bos_token_id(0)
    w.add_eos_token_id(0)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)


def add(w, name, array, qtype):
    array = np.ascontiguousarray(array, dtype=np.float32)
    if qtype == Q.F32:
        w.add_tensor(name, array)
    elif qtype == Q.F16:
        w.add_tensor(name, array.astype(np.float16))
    else:
        w.add_tensor(name, gguf.quants.quantize(array, qtype), raw_dtype=qtype)


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
