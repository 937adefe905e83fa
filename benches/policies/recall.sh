#!/bin/sh
# Predictors on recorded traces: records the bundled demo model on held-out text with what later routers say, and judges
# every predictor by layer and distance. Nothing is read ahead: recall does not depend on what is in memory.
#
# usage: benches/policies/recall.sh WORK_DIR MACHINE
# Needs hobbit-perplexity and hobbit-sim in $BIN (default: target/release).
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
bin=${BIN:-$root/target/release}
models=$root/models
work=${1:?a folder for traces}
results=$root/benches/results/${2:?name of the machine}
mkdir -p "$work" "$results"
cd "$work"

# As run.sh: the first third calibrates (the path table), the rest evaluates.
head -n 130 "$models/demo-heldout-prose.txt" > prose-cal.txt
tail -n +131 "$models/demo-heldout-prose.txt" > prose-eval.txt
head -n 560 "$models/demo-heldout-code.txt" > code-cal.txt
tail -n +561 "$models/demo-heldout-code.txt" > code-eval.txt

# stacked-gate and cross-layer record the same: the best scores of the next three routers.
for text in prose-cal code-cal prose-eval code-eval; do
    [ -s gates-$text.trace ] || "$bin/hobbit-perplexity" -m "$models/demo.gguf" -f $text.txt -c 512 -b 512 -ub 1 -t 1 \
        --expert-cache 50% --predictor stacked-gate --prefetch off --prefetch-distance 3 --trace gates-$text.trace \
        > gates-$text.log 2>&1
done
recall() {
    "$bin/hobbit-sim" recall gates-prose-eval.trace gates-code-eval.trace \
        --calibration gates-prose-cal.trace,gates-code-cal.trace "$@"
}
recall --json > "$results/predictors-demo.json"
recall
