#!/usr/bin/env python3
"""Makes a text in the shape of a chat: lines of held-out prose and code as a user's turns, answered by the model
itself.

It is no real dialogue: the model was never trained on any. It shows topics that change every few dozen tokens.
usage: chat.py HOBBIT_CLI MODEL PROSE CODE > chat.txt
"""
import subprocess
import sys

N_TURNS = 60
cli, model, prose, code = sys.argv[1:]
prose = [line.strip() for line in open(prose) if line.strip()]
code = [line.rstrip() for line in open(code) if len(line.strip()) > 20]
turns = []
for i in range(N_TURNS):
    question = prose[i * 4 % len(prose)] if i % 2 == 0 else "\n".join(code[i // 2 * 6 : i // 2 * 6 + 3])
    command = [cli, "-m", model, "-no-cnv", "-p", question + "\n", "-n", "64", "-t", "1", "--seed", str(i + 1)]
    command += ["--temp", "0.8", "--no-display-prompt"]
    answer = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True).stdout
    turns.append(f"User: {question}\nAssistant: {answer.strip()}\n")
print("\n".join(turns), end="")
