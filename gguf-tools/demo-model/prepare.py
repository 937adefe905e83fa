#!/usr/bin/env python3
"""Collects the two training texts, trains the tokenizer, writes token arrays.

Prose: the King James text of Debian's `bible-kjv-text`, read with `bible` of
Debian's `bible-kjv`: one verse a line, a blank line between chapters, one
document a book.
Code: sources of the Python 3.11 standard library, as in Debian's
`libpython3.11-minimal` and `libpython3.11-stdlib`: one document a file.

A contiguous piece of each is held out: it is written as plain text and neither
the model nor the tokenizer sees it.
"""
import argparse, os, re, subprocess
import numpy as np
import bpe

VOCAB = 4096
LIB = "/usr/lib/python3.11"
# Tables, generated files, tests and the like are left out.
SKIP_FILES = {"_sysconfigdata__linux_x86_64-linux-gnu.py", "turtle.py", "this.py",
              "locale.py", "_pydecimal.py", "pickletools.py", "sre_constants.py",
              "nturl2path.py", "_pyio.py", "mimetypes.py", "symbol.py", "entities.py"}
DIRS = {"", "asyncio", "collections", "concurrent", "ctypes", "email", "html", "http",
        "importlib", "json", "logging", "multiprocessing", "re", "sqlite3", "tomllib",
        "unittest", "urllib", "wsgiref", "xml", "xmlrpc", "zoneinfo", "dbm"}
CODE_HELDOUT = ["queue.py", "quopri.py", "random.py"]  # neighbours in the alphabet


def prose_books():
    """[(book, [chapter text])]; a chapter is its verses, one a line."""
    out = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], stdin=subprocess.DEVNULL,
                         capture_output=True, check=True).stdout.decode("latin-1")
    books, name, chapter = [], None, None
    for line in out.splitlines():
        m = re.match(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.*)$", line)
        if not m:
            raise SystemExit(f"unexpected line from `bible`: {line!r}")
        b, c, _, text = m.groups()
        if b != name:
            books.append((b, []))
            name, chapter = b, None
        if c != chapter:
            books[-1][1].append([])
            chapter = c
        books[-1][1][-1].append(text.strip())
    return [(b, ["\n".join(v) + "\n" for v in chapters]) for b, chapters in books]


def code_files():
    listing = "".join(subprocess.run(["dpkg", "-L", p], capture_output=True, check=True,
                                     text=True).stdout
                      for p in ("libpython3.11-minimal", "libpython3.11-stdlib"))
    files = []
    for path in sorted(set(listing.split("\n"))):
        if not path.startswith(LIB + "/") or not path.endswith(".py"):
            continue
        rel = path[len(LIB) + 1:]
        top = rel.split("/")[0] if "/" in rel else ""
        if top not in DIRS or os.path.basename(rel) in SKIP_FILES or "/test" in rel:
            continue
        text = open(path, encoding="utf-8").read().replace("\r\n", "\n")
        if len(text) > 200:
            files.append((rel, text))
    return files


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--work", required=True, help="folder for tokens and the tokenizer")
    ap.add_argument("--models", required=True, help="folder for the held-out texts")
    a = ap.parse_args()
    os.makedirs(a.work, exist_ok=True)

    books = prose_books()
    print(len(books), "books:", " ".join(f"{b}({len(c)})" for b, c in books))
    # Nehemiah 8 to Esther 10, held out
    docs_prose, held = [], []
    for b, chapters in books:
        cut = {"Neh": 7, "Est": 0}.get(b, len(chapters))
        held += chapters[cut:]
        if chapters[:cut]:
            docs_prose.append("\n".join(chapters[:cut]))
    held_prose = "\n".join(held)

    files = code_files()
    docs_code = [t for rel, t in files if rel not in CODE_HELDOUT]
    held_code = "\n".join(t for rel, t in files if rel in CODE_HELDOUT)
    for name, docs, h in (("prose", docs_prose, held_prose), ("code", docs_code, held_code)):
        print(name, len(docs), "documents,", sum(len(d.encode()) for d in docs),
              "bytes; held out", len(h.encode()), "bytes,", len(h.split()), "words")
        with open(os.path.join(a.models, f"demo-heldout-{name}.txt"), "w") as f:
            f.write(h)

    # half of the code, so that prose has the larger say in the vocabulary
    tok = bpe.train(docs_prose + docs_code[::2], VOCAB)
    tok.save(os.path.join(a.work, "tokenizer.json"))

    for name, docs, h in (("prose", docs_prose, held_prose), ("code", docs_code, held_code)):
        ids = []
        for d in docs:
            ids += [0] + tok.encode(d).ids
        ids.append(0)
        np.save(os.path.join(a.work, f"{name}.npy"), np.array(ids, dtype=np.int16))
        hid = tok.encode(h).ids
        assert tok.decode(hid) == h
        np.save(os.path.join(a.work, f"heldout-{name}.npy"), np.array(hid, dtype=np.int16))
        print(name, len(ids), "tokens; held out", len(hid), "tokens,",
              round(len(h.encode()) / len(hid), 3), "bytes per token")
    np.save(os.path.join(a.work, "newline.npy"), np.array(bpe.ends_line(tok)))


if __name__ == "__main__":
    main()
