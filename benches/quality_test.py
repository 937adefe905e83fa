#!/usr/bin/env python3
"""The quality bench finds a damaged model, accuses no equal one, and refuses what it cannot measure.

    cargo build --release --workspace && benches/quality_test.py
"""

import array
import contextlib
import io
import math
import pathlib
import sys
import tempfile
import unittest
from collections.abc import Callable

import quality
import quality_arms
import quality_run
from quality_arms import ROOT, Arm, Refused, Subject, Workshop

sys.path.append(str(ROOT / "benches/server"))
from attack_files import Gguf  # noqa: E402

PROGRAMS = ROOT / "target/release"
DEMO, PROSE = quality_arms.BUNDLED[0], ROOT / "models/demo-heldout-prose.txt"
# Experts of a layer, and bytes of a Q8_0 block, which begins with its scale (f16).
N_EXPERTS, BLOCK = 8, 34


def damaged(to: pathlib.Path, layer: int, damage: Callable[[list[bytes]], None]) -> pathlib.Path:
    """The demo model after `damage` changed the slices of one layer's experts."""
    gguf, raw = Gguf(DEMO), bytearray(DEMO.read_bytes())
    data = len(raw) - len(gguf.data)
    for name, shape in gguf.shapes.items():
        if name.startswith(f"blk.{layer}.") and name.endswith("_exps.weight"):
            assert shape[2] == N_EXPERTS
            start, size = data + gguf.offsets[name], math.prod(shape[:2]) // 32 * BLOCK
            slices = [bytes(raw[start + i * size : start + (i + 1) * size]) for i in range(N_EXPERTS)]
            damage(slices)
            raw[start : start + N_EXPERTS * size] = b"".join(slices)
    to.write_bytes(raw)
    return to


def swap(slices: list[bytes]) -> None:
    """Two experts change places; their rows of the router do not."""
    slices[0], slices[1] = slices[1], slices[0]


def negate(slices: list[bytes]) -> None:
    """An expert's scales change their signs: a wrong quant."""
    expert = bytearray(slices[0])
    expert[1::BLOCK] = bytes(byte ^ 0x80 for byte in expert[1::BLOCK])
    slices[0] = bytes(expert)


def silence(slices: list[bytes]) -> None:
    """An expert loses its scales: it adds nothing any more."""
    expert = bytearray(slices[0])
    expert[0::BLOCK] = expert[1::BLOCK] = bytes(len(expert) // BLOCK)
    slices[0] = bytes(expert)


class Judge(unittest.TestCase):
    def test_finds_damage(self):
        with tempfile.TemporaryDirectory() as made:
            directory = pathlib.Path(made)
            subject = Subject(DEMO, PROGRAMS)
            workshop = Workshop(subject, directory, 1, (PROSE, 512))
            runner = quality_run.Runner(PROGRAMS, subject, directory, False, 1)
            text = runner.text(PROSE, "prose", 8, 12)
            arms = {arm.name: arm for arm in workshop.with_controls([Arm("drop: --precision dynamic --t1 0 --t2 0")])}
            exact = runner.measure(text, arms["exact"], subject.expert_bytes)

            def row(arm: Arm, percent: float = 25.0) -> dict:
                cache_bytes = int(subject.expert_bytes * percent / 100)
                found = runner.measure(text, arm, cache_bytes)
                return quality.new_row("prose", percent, cache_bytes, arm, found, exact, True)

            def of_file(name: str, layer: int, damage) -> dict:
                arm = Arm(f"{name}:")
                arm.path = damaged(directory / f"{name}.gguf", layer, damage)
                return row(arm)

            # Equal predictions, however few experts are in memory.
            equal = row(arms["exact"])
            self.assertEqual(equal["loss"], "none")
            self.assertLess(abs(equal["kl"]["value"]), 1e-4)
            self.assertEqual(equal["task"]["questions"], 12)
            self.assertEqual(equal["task"]["change"], {"value": 0.0, "uncertainty": 0.0})
            self.assertTrue(equal["bytes_per_token"] > 0 and equal["hit_rate"] < 1 and equal["token_ms"] > 0)
            # Nearly lossless: other predictions, but no loss that could be told from chance.
            smaller = row(arms["uniform q6_k"])
            self.assertEqual(smaller["loss"], "within")
            self.assertGreater(smaller["kl"]["value"], 1e-4)

            bad = [of_file("swapped", 0, swap), of_file("negated", 2, negate), row(arms["drop"], 5.0)]
            for found in bad:
                self.assertEqual(found["loss"], "beyond", found)
                top = found["same_top"]
                self.assertLess(top["value"], 1 - quality.ERRORS_MAX * top["uncertainty"])
            # Perplexity of so few tokens does not tell one silent expert from chance; divergence does.
            silent = of_file("silent", 2, silence)["kl"]
            self.assertGreater(silent["value"], quality.ERRORS_MAX * silent["uncertainty"])
            self.assertGreater(silent["value"], 2 * smaller["kl"]["value"])

    def test_predictions_that_are_no_numbers_are_a_loss(self):
        none, one = {"value": None, "uncertainty": None}, {"value": 0.0, "uncertainty": 1.0}
        self.assertEqual(quality.loss({"cost": none, "kl": one}, False), "beyond")
        self.assertEqual(quality.loss({"cost": one, "kl": one}, False), "within")
        self.assertEqual(quality_run.answers([1.0, None, None, None], [0]), [False])

    def test_control_lies_between_its_neighbours(self):
        def row(arm, size, kl):
            return {"arm": arm, "is_control": True, "bytes_per_token": size, "perplexity": kl, "kl": {"value": kl}}

        controls = quality.frontier([row("large", 40, 1.0), row("small", 20, 3.0), row("useless", 30, 4.0)])
        self.assertEqual([control["arm"] for control in controls], ["small", "large"])
        self.assertEqual(quality.control(25, controls), {"perplexity": 2.5, "kl": 2.5, "between": ["small", "large"]})
        self.assertEqual(quality.control(10, controls)["between"], ["small"])
        self.assertEqual(quality.control(90, controls)["between"], ["large"])


class Questions(unittest.TestCase):
    def test_one_of_four_continuations_is_the_texts_own(self):
        context, length = quality_run.QUESTION - 23, 23
        chunks, golds = quality_run.questions(array.array("i", range(3000)), 100, 1)
        self.assertEqual((len(chunks), len(golds), set(golds)), (400, 100, {0, 1, 2, 3}))
        for i, chunk in enumerate(chunks):
            self.assertEqual(len(chunk), quality_run.QUESTION)
            begin, ending = chunk[0], chunk[context]
            self.assertEqual(list(chunk[:context]), list(range(begin, begin + context)))
            self.assertEqual(list(chunk[context:]), list(range(ending, ending + length)))
            is_own = i % 4 == golds[i // 4]
            self.assertEqual(ending == begin + context, is_own)
            self.assertTrue(is_own or ending + length <= begin or ending >= begin + quality_run.QUESTION)
        self.assertEqual(quality_run.questions(array.array("i", [5] * 3000), 9, 1), ([], []))

    def test_the_most_probable_continuation_is_chosen(self):
        losses = [3.0, 2.0, 4.0, 5.0, 1.0, 2.0, 3.0, 4.0]
        ppl = [math.exp(sum(losses[: i + 1]) / (i + 1)) for i in range(8)]
        self.assertEqual(quality_run.answers(ppl, [1, 3]), [True, False])


class Refusals(unittest.TestCase):
    def refused(self, *words: str) -> str:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(quality.main(["--bin", str(PROGRAMS), "--windows", "2", *words]), 1)
        return said.getvalue()

    def test_what_cannot_be_measured_is_named(self):
        with tempfile.TemporaryDirectory() as made:
            short, listed = pathlib.Path(made, "short.txt"), pathlib.Path(made, "list.txt")
            short.write_text("In the beginning")
            listed.write_text("# a comment\n\nfine: --low q2_k\nodd --low q2_k\n")
            for words, parts in [
                (["--model", str(DEMO), "--text", str(short), "--arm", "a:"], ["short.txt", "tokens"]),
                (["--model", "none.gguf", "--arm", "a:"], ["none.gguf"]),
                (["--arm", "odd: --lwo q2_k"], ["arm 'odd'", "--lwo"]),
                (["--arm", "odd: --low q9_9"], ["arm 'odd'", "q9_9"]),
                (["--arm", "odd: --nested --experts q4_k"], ["arm 'odd'", "not allowed with"]),
                (["--arm", "odd: --nested --low q2_k"], ["arm 'odd'", "cannot be used with"]),
                (["--arm", "odd: --expert_cache=10%"], ["arm 'odd'", "--cache"]),
                (["--arm", "odd: --low 'q2_k"], ["arm 'odd'", "quotation"]),
                (["--arm", "--low q2_k"], ["--low q2_k", "NAME: FLAGS"]),
                (["--arm", "a: --low q2_k", "--arm", "a: --low q3_k"], ["two arms", "'a'"]),
                (["--arms", str(listed)], ["list.txt:4", "NAME: FLAGS"]),
                (["--arms", "none.txt"], ["none.txt"]),
            ]:
                said = self.refused(*words).replace("--arm=", "--arm ")
                self.assertTrue(all(part in said for part in parts), f"{words}: {said}")

    def test_every_list_of_arms_is_sound(self):
        lists = list((ROOT / "benches/quality/arms").glob("*.txt"))
        self.assertIn(quality_arms.DEFAULT, lists)
        for path in lists:
            arms = quality_arms.read_file(path)
            self.assertTrue(arms)
            quality_arms.check(arms, PROGRAMS)
        self.assertTrue(any(arm.is_promised for arm in quality_arms.read_file(quality_arms.DEFAULT)))
        self.assertFalse(Arm("a: --low q2_k --t1 0.5").is_promised or Arm("a: --low q2_k --experts q4_k").is_promised)

    def test_controls_are_smaller_and_stand_once(self):
        with tempfile.TemporaryDirectory() as made:
            subject = Subject(DEMO, PROGRAMS)
            workshop = Workshop(subject, pathlib.Path(made), 1, (PROSE, 512))
            of = lambda given: [arm.name for arm in workshop.with_controls(given)]
            uniform = [f"uniform {name}" for name in quality_arms.CONTROLS]
            self.assertEqual(of([]), ["exact", *uniform])
            self.assertEqual(of([Arm("small: --experts q4_k")]), ["exact", *uniform[:2], *uniform[3:], "small"])
            with self.assertRaises(Refused):
                of([Arm("exact: --low q2_k")])
            # Types larger than the model's own q4_k are no controls.
            small = Workshop(Subject(workshop.requantised("q4_k"), PROGRAMS), pathlib.Path(made, "s"), 1, (PROSE, 512))
            small.directory.mkdir()
            self.assertEqual([arm.name for arm in small.with_controls([])], ["exact", *uniform[3:]])


if __name__ == "__main__":
    unittest.main()
