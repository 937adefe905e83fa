#!/usr/bin/env python3
"""check.py judges recorded output: exactness, speed, time limits, and a machine without a GPU.

benches/gpu/check_test.py
"""

import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from unittest import mock

import check
from check import Check, Ran, Shape


def architecture(name: str, passes: bool, kl: float | None) -> str:
    record = {"architecture": name, "pass": passes, "unequal": 0 if passes else 3, "kl": kl, "error": None}
    return f"record: {json.dumps({'begin': name})}\n\nrecord: {json.dumps(record)}\n"


def tested(name: str, code: int | None, output: str) -> Check:
    with mock.patch.object(check, "run", return_value=Ran(code, output)):
        return check.test(pathlib.Path("devices"), name, "CUDA0", 60)


def bench(engine: str, decode: float, prompt: float, n_cpu_moe: int = 0) -> list[dict]:
    """The fields of hobbit-bench's records that count here."""
    both = [(0, 64, decode), (512, 0, prompt)]
    fields = {"n_cpu_moe": n_cpu_moe, "hobbit_engine": engine, "hobbit_outcome": "ok"}
    return [{"n_prompt": n_prompt, "n_gen": n_gen, "avg_ts": speed, **fields} for n_prompt, n_gen, speed in both]


def passed(names: tuple[str, ...]) -> list[Check]:
    return [Check(name, "pass") for name in names]


class Tests(unittest.TestCase):
    def test_architectures_are_counted_and_wrong_ones_named(self):
        output = architecture("llama", True, 1e-5) + architecture("gpt-oss", False, 0.2)
        found = tested("architectures", 101, output + "thread panicked at real.rs:1:\n1 failures\n")
        self.assertEqual((found.result, found.detail), ("fail", "1 of 2 exact, KL up to 2.0e-01; not gpt-oss"))
        found = tested("architectures", 0, architecture("llama", True, 1e-5) + "test result: ok. 1 passed; 0 failed")
        self.assertEqual((found.result, found.detail), ("pass", "1 of 1 exact, KL up to 1.0e-05"))

    def test_a_dead_program_is_named_with_what_it_did(self):
        output = architecture("llama", True, 0.0) + 'record: {"begin":"grok"}\n'
        found = tested("architectures", -6, output)
        self.assertEqual(found.detail, "died of SIGABRT in grok; 1 of 1 exact, KL up to 0.0e+00 before")
        found = tested("architectures", None, output)
        self.assertTrue(found.detail.startswith("no end within 60 s in grok"), found.detail)
        found = tested(
            "shrinking",
            101,
            "thread panicked at x.rs:1:\ncalled `Result::unwrap()` on an `Err` value: 3 of 300 tokens differ\nnote\n",
        )
        self.assertEqual(found.detail, "exit status 101: 3 of 300 tokens differ")

    def test_a_wrong_architecture_is_named_also_after_a_time_out(self):
        output = architecture("llama", True, 0.0) + architecture("gpt-oss", False, 0.2) + 'record: {"begin":"grok"}\n'
        found = tested("architectures", None, output)
        self.assertEqual(
            found.detail, "no end within 60 s in grok; 1 of 2 exact, KL up to 2.0e-01 before; not gpt-oss"
        )
        self.assertTrue(check.verdict([found, *passed(check.EXACT[1:])]).startswith("exact: no;"))

    def test_an_infinite_kl_fails(self):
        found = tested("architectures", 0, architecture("grok", True, None) + "test result: ok. 1 passed; 0 failed")
        self.assertEqual((found.result, found.detail), ("fail", "0 of 1 exact; not grok"))

    def test_a_refusal_is_skipped_with_its_reason(self):
        found = tested("unified_on", 0, 'record: {"skip":"\'CUDA0\' cannot"}\ntest result: ok. 1 passed;')
        self.assertEqual((found.result, found.detail), ("skip", "'CUDA0' cannot"))

    def test_a_test_that_is_missing_does_not_pass(self):
        self.assertEqual(tested("shrinking", 0, "running 0 tests\ntest result: ok. 0 passed;").result, "fail")

    def test_speeds_are_beside_the_profiles(self):
        speeds = dict.fromkeys(check.SPEEDS, 5.0) | {"pinned_gb_s": None}
        record = {"speeds": speeds, "profiles": {"RTX 4090": dict.fromkeys(check.SPEEDS, 25.0)}}
        found = tested("speeds", 0, f"record: {json.dumps(record)}\ntest result: ok. 1 passed;")
        self.assertEqual(
            [value for _, value in found.rows][:2], ["none (assumed: RTX 4090 25.0)", "5.0 (assumed: RTX 4090 25.0)"]
        )

    def test_llama_cpp_has_its_best_in_decode_and_in_prompts(self):
        theirs = bench("llama.cpp", 20.0, 100.0, 2) + bench("llama.cpp", 10.0, 400.0, 3)
        found = check.compared("Mixtral", bench("hobbit", 30.0, 300.0), theirs)
        self.assertEqual(found.detail, "decode 1.50x, prompt 0.75x")
        self.assertEqual(found.rows[1], ("prompt, t/s", "300.0, llama.cpp 400.0 (-ncmoe 3)"))
        infinite = [record | {"avg_ts": None} for record in theirs]
        self.assertEqual(check.compared("Mixtral", bench("hobbit", 30.0, 300.0), infinite).result, "fail")
        refused = [record | {"hobbit_outcome": "failed"} for record in theirs]
        self.assertEqual(check.compared("Mixtral", bench("hobbit", 30.0, 300.0), refused).result, "fail")

    def test_layers_on_the_cpu_leave_no_more_experts_on_the_device(self):
        self.assertEqual(Shape("", "", 6, 0, 50).n_cpu_moe(), [3, 4, 6])
        self.assertEqual(Shape("", "", 4, 0, 25).n_cpu_moe(), [3, 4])

    def test_the_verdict(self):
        shapes = [
            check.compared("a", bench("hobbit", 20.0, 90.0), bench("llama.cpp", 10.0, 100.0)),
            check.compared("b", bench("hobbit", 5.0, 90.0), bench("llama.cpp", 10.0, 100.0)),
        ]
        speeds = "decode 1.0x, prompt 0.9x of llama.cpp's best"
        self.assertEqual(
            check.verdict([*passed(check.EXACT), *shapes]), f"exact: yes; 8 of 8 checks pass; {speeds}"
        )
        late = [Check("shrinking", "fail", "no end within 9 s")]
        self.assertEqual(check.verdict([*passed(check.EXACT[:-1]), *late]), "exact: not known; 5 of 6 checks pass")
        self.assertEqual(
            check.verdict([Check(name, "skip") for name in check.EXACT]), "exact: not known; 0 of 0 checks pass"
        )

    def test_each_test_but_speeds_decides_exactness(self):
        for name in (name for name in check.TESTS if name != "speeds"):
            wrong = Check(name, "fail", "3 of 300 tokens differ")
            checks = [wrong if name == other.name else other for other in passed(check.TESTS)]
            self.assertEqual(check.verdict(checks), "exact: no; 6 of 7 checks pass", name)
        checks = [
            Check(name, "skip", "'CUDA0' cannot") if name == "unified_on" else Check(name, "pass")
            for name in check.TESTS
        ]
        self.assertEqual(check.verdict(checks), "exact: yes; 6 of 6 checks pass")

    def test_the_table_has_every_check_and_row(self):
        lines = check.table([Check("unified_on", "skip", "cannot", 1.2), Check("a", "pass", rows=[("decode", "3")])])
        self.assertEqual(
            lines.splitlines(),
            [
                "check       result  seconds",
                "unified on  skip    1        cannot",
                "a           pass    0",
                "  decode                     3",
            ],
        )

    def test_records_are_found_between_messages(self):
        first, second = ({"build_commit": "b1", "samples": [number]} for number in (1, 2))
        output = f"note: warm\n{json.dumps(first)}\nnote: {{}}\nllama.cpp: {json.dumps(second)}\ndone\n"
        self.assertEqual(check.rows_in(output), [first, second])
        self.assertEqual(check.rows_in("error: no\n"), [])

    def test_programs_end_at_their_limit(self):
        began = time.monotonic()
        self.assertIsNone(check.run(["sh", "-c", "sleep 60 & sleep 60"], 1).code)
        self.assertLess(time.monotonic() - began, 20)


LISTING = "printf 'Available devices:\\n  CUDA0: NVIDIA H100 (1 MiB, 1 MiB free)\\n'"
NO_CUBLAS = "echo 'error while loading shared libraries: libcublas.so.13: cannot open' >&2; exit 127"


@contextlib.contextmanager
def programs(script: str) -> Iterator[pathlib.Path]:
    """A directory with a hobbit-bench that runs this script. No Python package is found meanwhile."""
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.object(sys, "path", [f"{directory}/packages"]),
        mock.patch.dict(os.environ, {"LD_LIBRARY_PATH": "given"}),
    ):
        program = pathlib.Path(directory, "hobbit-bench")
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        yield program.parent


def main(*options: object) -> tuple[int, str, str]:
    """The exit status, stdout and stderr."""
    argv = ["check.sh", *map(str, options)]
    with (
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        return check.main(), out.getvalue(), said.getvalue()


class WithAGpu(unittest.TestCase):
    def test_libraries_of_python_packages_are_found(self):
        script = f'case "$LD_LIBRARY_PATH" in given:*/nvidia/cu13/lib) {LISTING} ;; *) {NO_CUBLAS} ;; esac'
        with programs(script) as directory:
            (directory / "packages/nvidia/cu13/lib").mkdir(parents=True)
            self.assertEqual(check.listed(directory), {"CUDA0": "NVIDIA H100 (1 MiB, 1 MiB free)"})

    def test_an_unwritable_file_is_refused_before_any_check(self):
        with programs(LISTING) as directory, mock.patch.object(check, "run_in_turn") as checks:
            status, _, said = main(directory, "--json", directory)
            self.assertEqual(status, 2)
            self.assertIn(f"check: cannot write {directory}: Is a directory", said)
            checks.assert_not_called()

    def test_an_interrupt_ends_with_the_results_so_far(self):
        todo = [
            ("architectures", lambda _: Check("architectures", "pass")),
            ("shrinking", mock.Mock(side_effect=KeyboardInterrupt)),
            ("speeds", mock.Mock(side_effect=AssertionError)),
        ]
        with programs(LISTING) as directory, mock.patch.object(check, "checks_of", return_value=todo):
            status, out, _ = main(directory, "--json", directory / "found.json")
            record = json.loads((directory / "found.json").read_text())
        self.assertEqual(status, 130)
        self.assertEqual([found["result"] for found in record["checks"]], ["pass", "skip", "skip"])
        self.assertRegex(out, r"(?s)shrinking +skip +0 +interrupted\n.*\nexact: not known; 1 of 1 checks pass\n$")
        todo[2][1].assert_not_called()

    def test_the_table_comes_before_the_file(self):
        with programs(LISTING) as directory, mock.patch.object(check, "checks_of", return_value=[]):
            write = mock.patch.object(pathlib.Path, "write_text", side_effect=OSError)
            out = io.StringIO()
            with write, contextlib.redirect_stdout(out), self.assertRaises(OSError):
                with mock.patch.object(sys, "argv", ["check.sh", str(directory), "--json", f"{directory}/found.json"]):
                    check.main()
        self.assertIn("exact: not known", out.getvalue())


class WithoutAGpu(unittest.TestCase):
    """As with a driver that finds no device: one line, exit status 1."""

    def message(self, script: str, *options: str) -> str:
        with programs(script) as directory:
            status, _, said = main(directory, *options)
        self.assertEqual((status, said.count("\n")), (1, 1), said)
        return said

    def test_no_device(self):
        stub = "echo 'ggml_cuda_init: failed to initialize CUDA: stub library' >&2\n"
        self.assertIn("no GPU found", self.message(stub + "printf 'Available devices:\\n  (none)\\n'"))

    def test_no_driver(self):
        said = self.message("echo 'error while loading shared libraries: libcuda.so.1: no such file' >&2; exit 127")
        self.assertIn("libcuda.so.1", said)

        self.assertNotIn("pip install", said)

    def test_no_cublas(self):
        said = self.message(NO_CUBLAS)
        self.assertIn("libcublas.so.13", said)
        self.assertIn("-m pip install nvidia-cublas and try again", said)
        self.assertIn("export LD_LIBRARY_PATH=SITE-PACKAGES/nvidia/cu13/lib", said)

    def test_another_device(self):
        self.assertIn("no device CUDA7: there are CUDA0", self.message(LISTING, "--device", "CUDA7"))


if __name__ == "__main__":
    unittest.main()
