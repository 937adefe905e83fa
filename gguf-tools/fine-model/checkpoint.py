"""Weights as one safetensors blob in parts that small transfers accept: matrices F16, norms and routers F32.
weights.0, weights.1, ... are its pieces in order; weights.json says how many, their SHA-256, and what was trained."""
import glob, hashlib, json, os
import numpy as np

PART = 15 << 20


def save(folder, tensors, about, via):
    """Writes `tensors` ({name: array}) into `folder`. The parts are made in `via` first (of the same file system, if
    renaming is to be at once), so that a kill leaves either the old ones or the new."""
    header, data = {}, []
    at = 0
    for name, t in tensors.items():
        raw = np.ascontiguousarray(t).tobytes()
        header[name] = dict(dtype={"float16": "F16", "float32": "F32"}[str(t.dtype)], shape=list(t.shape),
                            data_offsets=[at, at + len(raw)])
        data.append(raw)
        at += len(raw)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    blob = len(head).to_bytes(8, "little") + head + b"".join(data)
    parts = [blob[i:i + PART] for i in range(0, len(blob), PART)]
    about = dict(about, parts=[hashlib.sha256(p).hexdigest() for p in parts])
    files = {f"weights.{i}": p for i, p in enumerate(parts)} | {"weights.json": json.dumps(about, indent=1).encode()}
    os.makedirs(folder, exist_ok=True)
    os.makedirs(via, exist_ok=True)
    if os.stat(via).st_dev != os.stat(folder).st_dev:
        via = folder
    for name, p in files.items():
        with open(os.path.join(via, name + ".new"), "wb") as f:
            f.write(p)
    for name in files:
        os.replace(os.path.join(via, name + ".new"), os.path.join(folder, name))


def load(folder):
    """({name: F32 array}, about)"""
    about = json.load(open(os.path.join(folder, "weights.json")))
    blob = b""
    for i, want in enumerate(about["parts"]):
        path = os.path.join(folder, f"weights.{i}")
        p = open(path, "rb").read()
        if hashlib.sha256(p).hexdigest() != want:
            raise SystemExit(f"{path}: SHA-256 is not what weights.json says: a part of another save, or a broken copy")
        blob += p
    n = int.from_bytes(blob[:8], "little")
    out = {}
    for name, t in json.loads(blob[8:8 + n]).items():
        a, b = (8 + n + i for i in t["data_offsets"])
        dtype = {"F16": np.float16, "F32": np.float32}[t["dtype"]]
        out[name] = np.frombuffer(blob[a:b], dtype).reshape(t["shape"]).astype(np.float32)
    return out, about


def of_gguf(path):
    """The tensors of a fine-grained model by their names in torch, F32, from what export.py wrote."""
    import gguf  # not there where run.sh runs
    w = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
         for t in gguf.GGUFReader(path).tensors}
    out = {"embd": w["token_embd.weight"], "norm": w["output_norm.weight"]}
    for i in range(sum(name.endswith("attn_q.weight") for name in w)):
        of = lambda *names: np.concatenate([w[f"blk.{i}.{n}.weight"] for n in names], axis=-2)
        p, e = f"blocks.{i}.", f"blocks.{i}.experts."
        out |= {p + "attn_norm": w[f"blk.{i}.attn_norm.weight"], p + "ffn_norm": w[f"blk.{i}.ffn_norm.weight"],
                p + "qkv": of("attn_q", "attn_k", "attn_v"), p + "out": of("attn_output"),
                e + "gate_inp": of("ffn_gate_inp"), e + "gate_up": of("ffn_gate_exps", "ffn_up_exps"),
                e + "down": of("ffn_down_exps"), e + "shared_gate_up": of("ffn_gate_shexp", "ffn_up_shexp"),
                e + "shared_down": of("ffn_down_shexp")}
    return out
