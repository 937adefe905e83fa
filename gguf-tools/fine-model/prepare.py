#!/usr/bin/env python3
"""Collects the texts (texts.py), holds whole documents of each kind out, trains the tokenizer and
writes the tokens, all into --work:

    tokenizer.json          2816 tokens; 0 begins a text and ends a document
    tokens-KIND.xz          u16 little endian: 0, a document, 0, a document, ..., 0
    heldout-KIND.xz         the same for the documents held out, without the 0s
    ends-line.json          for each token whether a line ends with it
and the held-out texts into --models. Neither the model nor the tokenizer sees those."""
import argparse, json, lzma, os, sys
import numpy as np
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "demo-model"))
import bpe
import texts

VOCAB = 2816
# Whole documents, of licences that let them stand in a repository: public domain; PSF-2.0, BSD-3-Clause,
# MIT or Apache-2.0; PSF-2.0, MIT; GPL-2.0-or-later.
HELD_OUT = {
    "prose": ["Ruth", "Jonah", "Persuasion/18", "Pride And Prejudice/31"],
    "code": ["queue.py", "quopri.py", "text/tabwriter/tabwriter.go", "std/src/io/cursor.rs"],
    "docs": ["howto/sorting.rst.txt", "library/heapq.rst.txt", "path.md.gz", "querystring.md.gz"],
    "dialogue": ["Under_the_Burning_Suns/scenarios/02_Across_the_Harsh_Sands.cfg",
                 "Descent_Into_Darkness/scenarios/10_Endless_Night.cfg",
                 "Northern_Rebirth/scenarios/14a_Epilogue.cfg",
                 "storyline/act1/dialogs/Bender.lua", "storyline/act1/dialogs/Tamara.lua"],
}
# Bytes of each kind from which the tokenizer is made, taken evenly over the documents.
SAMPLE = {"prose": 7e6, "code": 6e6, "docs": 6e6, "dialogue": 4e6}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", required=True, help="where fetch.sh unpacked the packages")
    ap.add_argument("--work", required=True, help="folder for tokens and the tokenizer")
    ap.add_argument("--models", required=True, help="folder for the held-out texts")
    ap.add_argument("--vocabulary", help="a GGUF whose tokenizer to take instead of training one")
    a = ap.parse_args()
    os.makedirs(a.work, exist_ok=True)

    kept, held, sample = {}, {}, []
    for kind, names in HELD_OUT.items():
        docs = list(texts.documents(a.root, kind))
        held[kind] = [d for name in names for _, n, d in docs if n == name]
        if len(held[kind]) != len(names):
            raise SystemExit(f"{kind}: {len(held[kind])} of the {len(names)} documents to hold out were found: {names}")
        kept[kind] = [(package, d) for package, n, d in docs if n not in names]
        with open(os.path.join(a.models, f"fine-heldout-{kind}.txt"), "w") as f:
            f.write("\n".join(held[kind]))
        share = min(1.0, SAMPLE[kind] / sum(len(d) for _, d in kept[kind]))
        sample += [d for i, (_, d) in enumerate(kept[kind]) if int((i + 1) * share) > int(i * share)]
    tok = bpe.of_gguf(a.vocabulary) if a.vocabulary else bpe.train(sample, VOCAB)
    tok.save(os.path.join(a.work, "tokenizer.json"))
    json.dump(bpe.ends_line(tok), open(os.path.join(a.work, "ends-line.json"), "w"))

    def write(name, ids):
        path = os.path.join(a.work, name + ".xz")
        with lzma.open(path, "wb", preset=6) as f:
            f.write(np.array(ids, "<u2").tobytes())
        return os.path.getsize(path)

    for kind in HELD_OUT:
        ids, per = [], {}
        for i in range(0, len(kept[kind]), 256):
            part = kept[kind][i:i + 256]
            for (package, d), e in zip(part, tok.encode_batch([d for _, d in part])):
                ids += [0] + e.ids
                n = per.setdefault(package, [0, 0, 0])
                n[0], n[1], n[2] = n[0] + 1, n[1] + len(d.encode()), n[2] + len(e.ids)
        size = write("tokens-" + kind, ids + [0])
        text = "\n".join(held[kind])
        hid = tok.encode(text).ids
        assert tok.decode(hid) == text
        write("heldout-" + kind, hid)
        total = sum(n[1] for n in per.values())
        print(f"{kind}: {len(ids)} tokens, {total} bytes, {total / len(ids):.3f} a token, {size} packed; held out "
              f"{len(text.encode())} bytes, {len(text.split())} words, {len(hid)} tokens", flush=True)
        for package, (docs, size, tokens) in per.items():
            print(f"  {package}: {docs} documents, {size} bytes, {tokens} tokens", flush=True)


if __name__ == "__main__":
    main()
