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
