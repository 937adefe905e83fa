#!/bin/sh
# Policies on recorded traces: records the bundled demo model and a synthetic one with 64 experts, fits HOBBIT's weights
# on the calibration parts of the texts, replays the others under every policy and budget, and writes JSON and a
# Markdown table.
#
# usage: benches/policies/run.sh WORK_DIR MACHINE [TABLE.md]
# Needs hobbit-cli, hobbit-perplexity, hobbit-sim and gguf-tools in $BIN (default: target/release), and python3.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
bin=${BIN:-$root/target/release}
sim=${SIM:-$bin/hobbit-sim}
models=$root/models
work=${1:?a folder for traces}
results=$root/benches/results/${2:?name of the machine}
table=${3:-$results/policies-demo.md}
budgets=25%,37.5%,50%,62.5%,75%
mkdir -p "$work" "$results"
cd "$work"

# The first third calibrates, the rest evaluates.
head -n 130 "$models/demo-heldout-prose.txt" > prose-cal.txt
tail -n +131 "$models/demo-heldout-prose.txt" > prose-eval.txt
head -n 560 "$models/demo-heldout-code.txt" > code-cal.txt
tail -n +561 "$models/demo-heldout-code.txt" > code-eval.txt
[ -s chat.txt ] || python3 "$here/chat.py" "$bin/hobbit-cli" "$models/demo.gguf" prose-eval.txt code-eval.txt > chat.txt
# The synthetic model's vocabulary has no words, so that its texts are many tokens: the beginnings are enough.
head -c 9500 prose-cal.txt > syn-prose-cal.txt
head -c 7000 code-cal.txt > syn-code-cal.txt
head -c 12000 prose-eval.txt > syn-prose-eval.txt
head -c 9000 code-eval.txt > syn-code-eval.txt
[ -s syn64.gguf ] || "$bin/gguf-tools" synth syn64.gguf --preset qwen3moe-bench --layers 8 --embd 256 --ff 64 --heads 4 \
    --ctx 2048

# One token after the other, windows of 512 tokens, each a sequence. The last layer sees only the second half of each:
# logits of the others are not wanted, and llama.cpp leaves them out there.
record() {
    [ -s "$3.trace" ] || "$bin/hobbit-perplexity" -m "$1" -f "$2.txt" -c 512 -b 512 -ub 1 -t 1 --expert-cache 50% \
        --trace "$3.trace" > "$3.log" 2>&1
}
for text in prose-cal code-cal prose-eval code-eval chat; do
    record "$models/demo.gguf" $text demo-$text
done
for text in prose-cal code-cal prose-eval code-eval; do
    record syn64.gguf syn-$text syn-$text
done

for budget in 25 37.5 50 62.5 75; do
    for model in demo syn; do
        flags=$("$sim" calibrate $model-prose-cal.trace $model-code-cal.trace --budget $budget% |
            head -n 1 | tee "fit-$model-$budget.txt")
        "$sim" replay $model-*-eval.trace $([ $model = demo ] && echo demo-chat.trace) --budget $budget% \
            $flags --json > "fitted-$model-$budget.json"
    done
done
"$sim" replay demo-prose-eval.trace demo-code-eval.trace demo-chat.trace syn-prose-eval.trace syn-code-eval.trace \
    --policy all --budget $budgets --json > replays.json
python3 "$here/table.py" "$results/policies-demo.json" > "$table"
cat "$table"
