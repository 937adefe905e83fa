"""pytest's side of llama_tests.py: the given model instead of downloaded ones, and one record for each test.

Loaded by llama_tests.py with `-p`; never by itself. Reads HOBBIT_LLAMA_TESTS, a JSON file with
    model       path of the model that every server gets
    infill      path of the model for /infill
    extra       list of [pattern of test ids, arguments that their servers get besides]
    skip        list of [pattern of test ids, reason]
    keep        regular expressions on generated text that hold for any model
    records     file that gets one JSON object per line and test
"""

import fnmatch
import json
import os
import time

import pytest
import utils

with open(os.environ["HOBBIT_LLAMA_TESTS"]) as _file:
    SETTINGS = json.load(_file)

# Regular expressions that the running test asked of the text and that were not checked.
unchecked: list[str] = []

# Arguments that servers of the running test get besides.
besides: list[str] = []

_start = utils.ServerProcess.start
_match = utils.match_regex


def start(self, timeout_seconds: int = 120) -> None:
    """Starts the server with the model at hand."""
    if self.model_hf_repo or self.model_hf_file or self.model_url or self.model_file:
        infill = "infill" in (self.model_hf_repo or "")
        self.model_file = SETTINGS["infill"] if infill else SETTINGS["model"]
        self.model_hf_repo = self.model_hf_file = self.model_url = None
    if self.server_embeddings and self.pooling is None:
        self.pooling = "last"  # An encoder's file says how it is pooled; a decoder's does not.
    self.offline = False
    _start(self, timeout_seconds)


def match_regex(regex: str, text: str) -> bool:
    """What a model says is its own affair; that it says something is checked."""
    if regex in SETTINGS["keep"]:
        return _match(regex, text)
    unchecked.append(regex)
    return isinstance(text, str) and text != ""


utils.ServerProcess.start = start
utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.match_regex = match_regex

_popen = utils.subprocess.Popen


def popen(arguments, *positional, **named):
    """Servers get the arguments besides."""
    return _popen([*arguments, *besides], *positional, **named)


utils.subprocess.Popen = popen


def matches(item, pattern: str) -> bool:
    """Whether a test has that name; brackets stand for themselves."""
    return fnmatch.fnmatchcase(name(item), pattern.replace("[", "[[]"))


def name(item) -> str:
    """Test id as the lists have it: file::function[parameters]."""
    return item.nodeid.removeprefix("unit/")


def pytest_collection_modifyitems(items) -> None:
    """Tests that do not apply are skipped, with the reason."""
    for item in items:
        for pattern, reason in SETTINGS["skip"]:
            if matches(item, pattern):
                item.add_marker(pytest.mark.skip(reason=f"not applicable: {reason}"))
                break
        else:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="not applicable: needs a model of gigabytes to be downloaded"))


def pytest_runtest_setup(item) -> None:
    """Each test starts with nothing unchecked."""
    unchecked.clear()
    extra = [arguments for pattern, arguments in SETTINGS["extra"] if matches(item, pattern)]
    besides[:] = [argument for arguments in extra for argument in arguments]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """One record for each test: of the phase that decided it."""
    report = yield
    if report.when == "call" or report.outcome != "passed" and report.when == "setup":
        message = ""
        if report.outcome == "skipped":
            message = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.outcome == "failed":
            message = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
        record = {
            "test": name(item),
            "outcome": report.outcome,
            "message": message[:2000],
            "unchecked": list(dict.fromkeys(unchecked)),
            "seconds": round(report.duration, 2),
            "at": time.time(),
        }
        with open(SETTINGS["records"], "a") as file:
            file.write(json.dumps(record) + "\n")
    return report
