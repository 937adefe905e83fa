#!/usr/bin/env python3
"""Makes svg-term's loop hold its last frame, and writes "real time" into the window's bar.

usage: docs/images/hold.py SVG [SECONDS]      (default: 5)
"""

import re
import sys
from pathlib import Path

TITLE = '<text x="50%" y="25" text-anchor="middle" font-family="monospace" font-size="14" fill="#b9c0cb">{}</text>'


def held(svg, seconds):
    if "real time" in svg:
        raise SystemExit("hold: this picture holds its last frame already")
    (duration,) = map(float, re.findall(r"animation-duration:([\d.]+)s", svg))
    longer = duration + seconds
    frames = re.search(r"(@keyframes \w+\{)(.*?\})(\})", svg)
    steps = re.findall(r"([\d.]+%|to)\{(transform:[^}]*)\}", frames[2])
    at = [100 if place == "to" else float(place[:-1]) for place, _ in steps]
    scaled = [f"{place * duration / longer:.3f}%{{{step}}}" for place, (_, step) in zip(at, steps)]
    scaled.append(f"to{{{steps[-1][1]}}}")
    svg = svg[: frames.start()] + frames[1] + "".join(scaled) + frames[3] + svg[frames.end() :]
    svg = svg.replace(f"animation-duration:{duration}s", f"animation-duration:{longer:.6f}s")
    words = f"real time: {duration:.1f} s, then {seconds:g} s of rest"
    return svg.replace('fill="#18c132"/></svg>', 'fill="#18c132"/></svg>' + TITLE.format(words), 1)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(held(path.read_text(), float(sys.argv[2]) if len(sys.argv) > 2 else 5.0))
