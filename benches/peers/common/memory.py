"""How many threads a peer that maps its model should get.

Threads that wait for a page need no core: where the model does not fit in memory, twice as many keep more reads in
flight. Where it fits they only get in each other's way.

As a program: `memory.py MODEL THREADS` prints the number.
"""

from __future__ import annotations

import sys
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
READING_THREADS_PER_CORE = 2


def limits() -> list[int]:
    """The memory limits in bytes of this process's cgroup and of those around it, versions 1 and 2."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
        group = base / path.lstrip("/")
        while group.is_relative_to(base):
            limit = group / name
            text = limit.read_text().strip() if limit.is_file() else "max"
            if text != "max":
                found.append(int(text))
            group = group.parent
    return found


def available() -> int:
    """Bytes that a process can have here."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == "MemAvailable":
            return min([int(value.split()[0]) * 1024, *limits()])
    return min(limits(), default=0)


def threads_for(model: Path, threads: int) -> int:
    """`threads`, or twice as many for a model that will be read from its file all the time."""
    return threads if model.stat().st_size < available() else threads * READING_THREADS_PER_CORE


if __name__ == "__main__":
    print(threads_for(Path(sys.argv[1]), int(sys.argv[2])))
