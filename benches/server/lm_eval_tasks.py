#!/usr/bin/env python3
"""EleutherAI's lm-evaluation-harness against a running server: its own hellaswag, arc_easy and piqa on local texts.

    pip install -r requirements.txt
    ./lm_eval_tasks.py --url http://127.0.0.1:8080 [--key KEY] [--questions 100] [--against http://127.0.0.1:8081]

The task files are the harness's own; only their data sets, which would have to be downloaded, are replaced. A question
is two sentences of a held-out text in ../../models, and the choices are the sentence after them and others of the same
text. The harness uses the server's tokenizer and its probabilities of prompts (`echo` with `logprobs`). Prints a table.
Exits with 1 if a task finds no more right answers than chance, or if --against, a server of the same model, answers
otherwise.
"""

import argparse
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import lm_eval

TASKS = pathlib.Path(lm_eval.__file__).parent / "tasks"
MODELS = pathlib.Path(__file__).resolve().parents[2] / "models"
# Each task's file, and how many choices a question has.
FILES = {
    "hellaswag": ("hellaswag/hellaswag.yaml", 4),
    "arc_easy": ("arc/arc_easy.yaml", 4),
    "piqa": ("piqa/piqa.yaml", 2),
}


def questions(text: str, n: int, n_choices: int, seed: int) -> list[tuple[str, list[str], int]]:
    """(two sentences, choices, place of the right one)"""
    chance = random.Random(seed)
    found, sentences = [], []
    for paragraph in re.split(r"\n\s*\n", text):
        own = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", paragraph)]
        own = [part for part in own if 30 <= len(part) <= 160]
        sentences += own
        found += [(" ".join(own[at - 2 : at]), own[at]) for at in range(2, len(own))]
    chance.shuffle(found)
    asked = []
    for context, right in found[:n]:
        others = [other for other in sentences if other != right and other not in context]
        choices = chance.sample(others, n_choices - 1)
        place = chance.randrange(n_choices)
        choices.insert(place, right)
        asked.append((context, choices, place))
    return asked


def row(task: str, context: str, choices: list[str], place: int) -> dict:
    """A question in the form of a task's data set."""
    if task == "hellaswag":
        return {"activity_label": "Text", "ctx_a": context, "ctx_b": "", "endings": choices, "label": str(place)}
    if task == "arc_easy":
        labels = list("ABCD")[: len(choices)]
        return {"question": context, "choices": {"text": choices, "label": labels}, "answerKey": labels[place]}
    return {"goal": context, "sol1": choices[0], "sol2": choices[1], "label": place}


def write_tasks(root: pathlib.Path, text: str, n: int) -> None:
    """The harness's tasks with local data."""
    for task, (file, n_choices) in FILES.items():
        data = root / f"{task}.jsonl"
        rows = [row(task, *question) for question in questions(text, n, n_choices, seed=1)]
        data.write_text("".join(json.dumps(own) + "\n" for own in rows))
        own = {
            "include": str(TASKS / file), "task": f"local_{task}", "dataset_path": "json", "dataset_name": None,
            "dataset_kwargs": {"data_files": {"validation": str(data)}}, "training_split": None, "test_split": None,
        }
        # JSON is YAML.
        (root / f"local_{task}.yaml").write_text(json.dumps(own))


def evaluate(url: str, key: str, root: pathlib.Path, batch: int) -> dict:
    """What the harness measures: {task: results}."""
    out = root / "out"
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--include_path", str(root),
        "--tasks", ",".join(f"local_{task}" for task in FILES), "--output_path", str(out), "--log_samples",
        "--batch_size", str(batch),
        "--model_args", f"base_url={url}/v1/completions,model=served,tokenizer_backend=remote",
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": key}
    subprocess.run(command, check=True, env=os.environ | offline)
    newest = max(out.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())["results"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--against", help="another server of the same model, whose figures must be the same")
    parser.add_argument("--key", default="none")
    parser.add_argument("--text", default="prose,dialogue,docs", help="held-out texts of models/ (%(default)s)")
    parser.add_argument("--questions", type=int, default=100, help="of each task and text (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="prompts in a request (%(default)s)")
    options = parser.parse_args()
    failed = False
    print("| text | task | questions | right | by length | chance |\n|---|---|---|---|---|---|")
    for name in options.text.split(","):
        with tempfile.TemporaryDirectory() as root:
            root = pathlib.Path(root)
            write_tasks(root, (MODELS / f"fine-heldout-{name}.txt").read_text(), options.questions)
            found = evaluate(options.url, options.key, root, options.batch)
            other = evaluate(options.against, options.key, root, options.batch) if options.against else found
            for task, (_, n_choices) in FILES.items():
                own, again = ({metric: results[f"local_{task}"][f"{metric},none"] for metric in ("acc", "acc_norm")}
                              for results in (found, other))
                n = sum(1 for _ in (root / f"{task}.jsonl").open())
                right, by_length = own.values()
                print(f"| {name} | {task} | {n} | {right:.3f} | {by_length:.3f} | {1 / n_choices} |", flush=True)
                failed |= max(right, by_length) <= 1 / n_choices or own != again
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
