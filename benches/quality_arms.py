"""Arms of the quality bench: a name and a line of flags, and the model files that they need."""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEFAULT = ROOT / "benches/quality/arms/default.txt"
BUNDLED = [ROOT / "models/demo.gguf", ROOT / "models/fine.gguf"]
# Smaller quants of all experts: every arm has to be better than they are.
CONTROLS = ["q6_k", "q5_k", "q4_k", "q3_k", "q2_k"]
# All arms get the same memory and the same device.
TAKEN = re.compile(
    r"(--(mem-budget|expert-cache|trace|cache-state|routes|device|gpu-layers|n-gpu-layers)|-dev|-ngl)(=.*)?"
)


class Refused(Exception):
    """Something cannot be measured."""


@contextlib.contextmanager
def named(what: str):
    """Says of a refusal what it is about."""
    try:
        yield
    except Refused as refusal:
        raise Refused(f"{what}: {refusal}") from refusal


def check_names(arms: list["Arm"]) -> None:
    """Refuses two arms of one name."""
    names = [arm.name for arm in arms]
    if twice := [name for name in names if names.count(name) > 1]:
        raise Refused(f"two arms are named '{twice[0]}'; rename one")


def run(command: list) -> str:
    """Runs a program without the flags that users keep in their environment; its standard output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_ARG_", "HOBBIT_"))}
    words = [str(word) for word in command]
    try:
        ran = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        raise Refused(f"{words[0]}: {error.strerror}; build it with cargo build --release --workspace") from error
    if ran.returncode:
        said = ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"]
        errors = [line for line in said if line.startswith("error: ")]
        raise Refused((errors or said)[-1].removeprefix("error: "))
    return ran.stdout


class Line(argparse.ArgumentParser):
    """The bench's own flags, which stand among hobbit's."""

    def __init__(self):
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("--low")
        file = self.add_mutually_exclusive_group()
        file.add_argument("--experts")
        file.add_argument("--nested", action="store_true")
        file.add_argument("--expert-wise")

    def error(self, message: str):
        raise Refused(message)


@dataclasses.dataclass
class Arm:
    """One way to run a model, from a line NAME: FLAGS. A workshop sets `path` (the file to run), `low_path` and the
    bytes of its experts."""

    line: str
    path: pathlib.Path | None = None
    low_path: pathlib.Path | None = None
    expert_bytes: int = 0

    def __post_init__(self):
        self.name, colon, self.flags = (part.strip() for part in self.line.partition(":"))
        if not colon or not self.name:
            raise Refused(f"arm '{self.line}': expected NAME: FLAGS, as in 'low: --low q2_k'")
        try:
            own, self.words = Line().parse_known_args(shlex.split(self.flags))
        except (Refused, ValueError) as error:
            raise Refused(f"arm '{self.name}': {error}") from error
        self.low, self.experts, self.nested, self.expert_wise = own.low, own.experts, own.nested, own.expert_wise
        for word in self.words:
            if TAKEN.fullmatch(word.replace("_", "-")):
                raise Refused(f"arm '{self.name}': leave {word} out, all arms get the cache of --cache, on the CPU")
        if self.low and (self.nested or self.expert_wise):
            raise Refused(f"arm '{self.name}': --low cannot be used with --nested or --expert-wise")

    @property
    def is_control(self) -> bool:
        """Whether it is the exact model, or one of which only the experts' type differs."""
        return not (self.words or self.low or self.nested or self.expert_wise)

    @property
    def is_promised(self) -> bool:
        """Whether it has low versions at default thresholds: the documentation promises a bound for these."""
        flags = " ".join(self.words).replace("=", " ").replace("_", "-")
        changed = re.search(r"--t[12]\b|--precision exact", flags)
        return bool((self.low or self.nested) and not self.experts and not changed)


def read_file(path: pathlib.Path) -> list[Arm]:
    """Reads a file of arms, one a line; `#` begins a comment line."""
    arms = []
    try:
        text = path.read_text()
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            with named(f"{path}:{number}"):
                arms.append(Arm(line))
    return arms


def check(arms: list[Arm], programs: pathlib.Path) -> None:
    """Refuses flags that hobbit does not have before anything is measured."""
    check_names(arms)
    for arm in arms:
        with named(f"arm '{arm.name}'"):
            low = ["--low", arm.low] if arm.low else []
            run([programs / "hobbit-perplexity", *low, *arm.words, "--list-devices"])


class Subject:
    """A model that is measured."""

    def __init__(self, path: pathlib.Path, programs: pathlib.Path):
        self.path, self.name, self.programs = path, path.stem, programs
        found = self.inspect(path)
        self.expert_bytes, self.file_bytes = found["expert_bytes"], sum(file["bytes"] for file in found["files"])
        if not self.expert_bytes:
            raise Refused(f"{path}: found no experts, expected a Mixture-of-Experts model; give another --model")

    def inspect(self, path: pathlib.Path) -> dict:
        """What a file is made of."""
        return json.loads(run([self.programs / "gguf-tools", "inspect", "--json", path]))


@dataclasses.dataclass
class Workshop:
    """Makes the files that arms need, each once. Experts' widths are measured on `profiled`: a text and a number of
    its tokens."""

    subject: Subject
    directory: pathlib.Path
    threads: int
    profiled: tuple[pathlib.Path, int]

    def gguf_tools(self, output: pathlib.Path, *words) -> pathlib.Path:
        """The file that a run of gguf-tools makes, unless it is there."""
        if not output.exists():
            run([self.subject.programs / "gguf-tools", *words, "-o", output])
        return output

    def with_controls(self, given: list[Arm]) -> list[Arm]:
        """The arms with their files; first the exact model and the controls that are smaller, unless given."""
        controls = [Arm(f"uniform {name}: --experts {name}") for name in CONTROLS]
        own = [arm.experts for arm in given if arm.is_control]
        arms = [arm for arm in [Arm("exact:"), *controls] if arm.experts not in own] + given
        check_names(arms)
        for arm in arms:
            with named(f"arm '{arm.name}'"):
                self.prepare(arm)
        exact = [arm for arm in arms if arm.is_control and not arm.experts]
        is_pointless = lambda arm: arm in controls and arm.expert_bytes >= self.subject.expert_bytes
        return exact + [arm for arm in arms if arm not in exact and not is_pointless(arm)]

    def prepare(self, arm: Arm) -> None:
        """Makes the files of an arm."""
        arm.path, arm.expert_bytes = self.subject.path, self.subject.expert_bytes
        if arm.experts:
            arm.path = self.requantised(arm.experts)
        elif arm.nested:
            arm.path = self.gguf_tools(self.directory / "nested.gguf", "pack", arm.path, "--nested")
        elif arm.expert_wise:
            arm.path = self.expert_wise(arm.expert_wise)
        if arm.is_control:
            arm.expert_bytes = self.subject.inspect(arm.path)["expert_bytes"]
        if arm.low:
            # Low versions are made of the exact model, as quants that are published are.
            arm.low_path = arm.low if pathlib.Path(arm.low).exists() else self.requantised(arm.low)

    def requantised(self, types: str) -> pathlib.Path:
        """The model with other experts and everything else as it is: llama-quantize changes everything."""
        name = re.sub(r"\W", "-", types)
        made = self.directory / f"{name}.gguf"
        if not made.exists():
            pack = self.directory / f"{name}.pack.gguf"
            threads = ["--threads", self.threads]
            self.gguf_tools(pack, "pack", self.subject.path, "--high", types, *threads)
            self.gguf_tools(made, "unpack", pack)
            pack.unlink()
        return made

    def expert_wise(self, percent: str) -> pathlib.Path:
        """A pack whose experts have each their own width, as a user makes it."""
        (text, tokens), model = self.profiled, self.subject.path
        measured = ["--text", text, "--tokens", tokens, "--threads", self.threads]
        profile = self.gguf_tools(self.directory / "profile.json", "profile", model, *measured)
        pack = self.directory / f"expert-wise-{percent}.gguf"
        return self.gguf_tools(pack, "pack", model, "--profile", profile, "--max-loss", percent)
