#!/usr/bin/env python3
"""check.py judges recorded output: exactness, speed, time limits, and a machine without a GPU.

benches/gpu/check_test.py
"""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import time
import unittest
from unittest import mock

import check
from check import Check, Ran, Shape


def architecture(name: str, passes: bool, kl: float) -> str:
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
        skipped = Check("unified_on", "skip", "cannot")
        found = check.verdict([*passed(check.EXACT), skipped, *shapes])
        self.assertEqual(found, f"exact: yes; 6 of 6 checks pass; {speeds}")
        wrong = [Check("shrinking", "fail", "3 of 300 tokens differ")]
        self.assertEqual(check.verdict([*passed(check.EXACT[:-1]), *wrong]), "exact: no; 3 of 4 checks pass")
        late = [Check("shrinking", "fail", "no end within 9 s")]
        self.assertEqual(check.verdict([*passed(check.EXACT[:-1]), *late]), "exact: not known; 3 of 4 checks pass")
        self.assertEqual(
            check.verdict([Check(name, "skip") for name in check.EXACT]), "exact: not known; 0 of 0 checks pass"
        )

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
        self.assertEqual(check.json_in('note: warm\n[\n  {\n    "a": [\n      1\n    ]\n  }\n]\ndone\n'), [{"a": [1]}])
        self.assertEqual(check.json_in("error: no\n"), [])

    def test_programs_end_at_their_limit(self):
        began = time.monotonic()
        self.assertIsNone(check.run(["sh", "-c", "sleep 60 & sleep 60"], 1).code)
        self.assertLess(time.monotonic() - began, 20)


class WithoutAGpu(unittest.TestCase):
    """As with a driver that finds no device: one line, exit status 1."""

    def message(self, script: str, *options: str) -> str:
        with tempfile.TemporaryDirectory() as directory:
            program = pathlib.Path(directory, "hobbit-bench")
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
            argv = ["check.sh", directory, *options]
            with mock.patch.object(sys, "argv", argv), contextlib.redirect_stderr(io.StringIO()) as said:
                self.assertEqual(check.main(), 1)
        self.assertEqual(said.getvalue().count("\n"), 1, said.getvalue())
        return said.getvalue()

    def test_no_device(self):
        stub = "echo 'ggml_cuda_init: failed to initialize CUDA: stub library' >&2\n"
        self.assertIn("no GPU found", self.message(stub + "printf 'Available devices:\\n  (none)\\n'"))

    def test_no_driver(self):
        said = self.message("echo 'error while loading shared libraries: libcuda.so.1: no such file' >&2; exit 127")
        self.assertIn("libcuda.so.1", said)

    def test_another_device(self):
        listing = "printf 'Available devices:\\n  CUDA0: NVIDIA H100 (1 MiB, 1 MiB free)\\n'"
        self.assertIn("no device CUDA7: there are CUDA0", self.message(listing, "--device", "CUDA7"))


if __name__ == "__main__":
    unittest.main()
