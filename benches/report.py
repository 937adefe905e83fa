#!/usr/bin/env python3
"""Makes tables and pictures of raw records, and checks that the committed tables are what the records make.

usage: benches/report.py [DIRECTORY...]       fills in the marked tables of DIRECTORY/README.md, benches/README.md,
                                              draws DIRECTORY/*.svg (default: every benches/results/*/prove)
       benches/report.py --check              changes nothing; fails if a committed table differs or a verdict is wrong
       benches/report.py --table NAME [DIRECTORY...]
       benches/report.py --quality FILE.json...     draws loss against bytes read per token, beside each file
       benches/report.py --sim FILE.json -o FILE.svg   draws what `hobbit-sim replay --json` or `recall --json` printed

Needs Python 3.11 and `pip install -r benches/requirements.txt`. A table stands between the lines `<!-- report NAME -->`
and `<!-- /report NAME -->` of a Markdown file.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from lab import checks, plots, records, tables

BENCHES = Path(__file__).resolve().parent
MARKED = re.compile(r"^<!-- report (\S+) -->\n(.*?)^<!-- /report \1 -->$", re.MULTILINE | re.DOTALL)


def filled(page: Path, data) -> str:
    """The text of a page with every marked table made anew."""
    def table(found: re.Match) -> str:
        name = found[1]
        if name not in tables.NAMES:
            sys.exit(f"{page}: no table '{name}'; expected one of {', '.join(tables.NAMES)}")
        made = tables.table(name, data)
        if made is None:
            sys.exit(f"{page}: no record belongs to table '{name}'")
        return f"<!-- report {name} -->\n{made.markdown()}<!-- /report {name} -->"

    text = page.read_text()
    if len(re.findall("^<!-- report ", text, re.MULTILINE)) != len(MARKED.findall(text)):
        sys.exit(f"{page}: a marker '<!-- report NAME -->' has no end '<!-- /report NAME -->' on a line of its own")
    return MARKED.sub(table, text)


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n\nNeeds")[0])
    parser.add_argument("directories", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--table", choices=tables.NAMES)
    parser.add_argument("--quality", nargs="+", type=Path)
    parser.add_argument("--sim", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.quality:
        for path in args.quality:
            plots.quality(path)
        return
    if args.sim:
        plots.simulated(args.sim, args.output or args.sim.with_suffix(".svg"))
        return
    directories = args.directories or sorted(BENCHES.glob("results/*/prove"))
    data = records.read(directories)
    if args.table:
        made = tables.table(args.table, data)
        print(made.markdown() if made else sys.exit(f"no record belongs to table '{args.table}'"), end="")
        return
    stale = []
    pages = [(BENCHES / "README.md", data)] if not args.directories else []
    pages += [(directory / "README.md", records.read([directory])) for directory in directories]
    for page, rows in pages:
        if not page.is_file():
            continue
        text = filled(page, rows)
        if text != page.read_text():
            stale.append(page)
            if not args.check:
                page.write_text(text)
                print(f"written: {page}")
    if args.check:
        checks.run()
        sys.exit(f"not what the records make: {', '.join(map(str, stale))}; run benches/report.py" if stale else 0)
    for directory in directories:
        plots.draw(records.read([directory]), directory)


if __name__ == "__main__":
    main()
