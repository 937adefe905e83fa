#!/usr/bin/env python3
"""What three papers report beside the same here, from recorded runs: Markdown on standard output.

usage: papers.py HOBBIT_SIM [--low-bytes N%] [--budgets N%,N%] NAME[@N%,N%] CALIBRATION EVALUATION [NAME CALIBRATION
EVALUATION ...]

CALIBRATION and EVALUATION are traces of one model, each one file or several with commas: weights and path
tables are fitted on the first and judged on the second. The same file twice is hindsight, and the tables say so.
Predictions take traces recorded with --predictor stacked-gate --prefetch off --prefetch-distance 3 (or 4); without,
their lines are left out. Budgets behind a name are that model's. Weights are fitted by about a hundred replays for each
budget and way to share slots: a few thousand tokens of calibration are enough.
"""
import collections
import json
import subprocess
import sys

# A machine of two cores: time by bytes of an expert, and an NVMe drive. Ratios of speeds hang on it.
SECONDS_PER_BYTE = 0.63e-3 / 3.06e6
LAYER_MS = 0.17
LINK = ["--link", "1.8GiB", "--latency-us", "100"]
THRESHOLDS = ["--t1", "0.6", "--t2", "0.9"]
LOW_SHARE = "10%"
# A layer of HOBBIT begins when its loads have ended (3.1).
WAITS = ["--overlap", "off"]
NOT = "–"


def options(words):
    chosen = {"--low-bytes": "31%", "--budgets": "25%,50%"}
    while words and words[0] in chosen:
        name, value, *words = words
        chosen[name] = value
    if not words or len(words) % 3:
        sys.exit(__doc__.strip())
    return chosen, [words[at : at + 3] for at in range(0, len(words), 3)]


def run(*words):
    done = subprocess.run([sim, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def replay(files, *more, policies="lru", budgets=None):
    """Rows of all files by budget, predictor and policy; numbers are summed over files."""
    words = ["replay", *files, "--policy", policies, "--budget", ",".join(budgets or BUDGETS), "--json", *more]
    rows = {}
    for trace in json.loads(run(*words)):
        for row in trace["replays"]:
            own = rows.setdefault((row["budget"], row["predictor"], row["policy"]), collections.Counter())
            for phase in ("prefill", "decode"):
                part = row["outcome"][phase]
                own["misses"] += sum(part["misses"].values())
                own["low"] += part["misses"]["low"]
                own["skipped"] += part["misses"]["skipped"]
                for key in ("hits", "penalty", "tokens", "seconds", "stall_seconds"):
                    own[key] += part[key]
            own["bytes"] += row["outcome"]["bytes_read"]
            own["issued"] += row["outcome"]["prefetch"]["issued"]
            own["useful"] += row["outcome"]["prefetch"]["useful"]
    return rows


def header(file):
    return json.loads(run("show", "--header", file))["header"]


def hit_rate(row):
    return row["hits"] / max(row["hits"] + row["misses"], 1)


def percent(share, digits=1):
    return f"{100 * share:.{digits}f} %"


def less(own, base):
    """By how much a penalty is below another, with its sign."""
    return percent(1 - own / base, 2) if base else NOT


def speed(row, base):
    ratio = (row["tokens"] / row["seconds"]) / (base["tokens"] / base["seconds"])
    return f"{ratio:.3f}x"


def table(heading, lines):
    print("| " + " | ".join(heading) + " |")
    print("|---" * len(heading) + "|")
    for line in lines:
        print("| " + " | ".join(line) + " |")
    print()


class Subject:
    """A model with traces to fit on and to judge on."""

    def __init__(self, name, calibration, evaluation):
        self.name, _, budgets = name.partition("@")
        self.budgets = (budgets or chosen["--budgets"]).split(",")
        self.calibration, self.evaluation = calibration.split(","), evaluation.split(",")
        self.header = header(self.evaluation[0])
        layers = self.header["model"]["layers"]
        self.n_layers, self.n_expert, self.n_used = len(layers), layers[0]["n_expert"], layers[0]["n_used"]
        largest = max(layer["bytes_high"] for layer in layers)
        self.time = [*LINK, "--layer-ms", str(LAYER_MS), "--expert-ms", f"{largest * SECONDS_PER_BYTE * 1e3:.4f}"]
        self.has_scores = self.header["settings"]["predictor"] in ("stacked-gate", "cross-layer")
        self.distance = self.header["settings"]["distance"] if self.has_scores else 0
        self.hindsight = self.calibration == self.evaluation
        self.recall = None

    def title(self):
        same = "; fitted on the very traces it is judged on" if self.hindsight else ""
        return f"{self.name} ({self.n_layers} layers of {self.n_expert} experts, {self.n_used} used{same})"

    def fitted(self, budget, slots):
        """HOBBIT's weights, fitted on the penalty of mixed precision."""
        flags = self.calibrated("--budget", budget, "--slots", slots, "--low-share", LOW_SHARE, *THRESHOLDS)
        return flags["--policy-weights"]

    def calibrated(self, *words):
        """The flags that calibrate prints."""
        flags = run("calibrate", *self.calibration, "--low-bytes", LOW_BYTES, *words).splitlines()[0].split()
        return dict(zip(flags[::2], flags[1::2]))

    def shares(self):
        """T1 and T2 that give Mixtral's shares of precisions."""
        flags = self.calibrated("--budget", BUDGETS[0], "--shares", "67/30/3")
        return float(flags["--t1"]), float(flags["--t2"])

    def predicted(self):
        if self.recall is None:
            words = ["recall", self.evaluation[0], "--calibration", ",".join(self.calibration), "--distance", "4", "--json"]
            self.recall = json.loads(run(*words))[0]
        return self.recall

    def found(self, predictor, distance):
        """Recall and experts predicted."""
        rows = self.predicted()["predictors"]
        row = next((row for row in rows if (row["predictor"], row["distance"]) == (predictor, distance)), None)
        return (row["recall"], row["experts"]) if row else None

    def best_scores(self, distance, aim=0.97):
        """How often a later router's best score is that of its first expert; how many scores hold `aim`."""
        layers = [layer["layer"] for layer in self.header["model"]["layers"]]
        before = {layer: layers[at - distance] for at, layer in enumerate(layers) if at >= distance}
        first, judged, used, at_rank, predicted = 0, 0, 0, collections.Counter(), {}
        for line in run("show", self.evaluation[0]).splitlines():
            record = json.loads(line)
            if record["record"] == "batch":
                predicted = {}
            if record["record"] != "layer" or record["n_tokens"] != 1:
                continue
            own = [one for one in record["predictions"] if one["distance"] == distance]
            predicted[record["layer"]] = [one["expert"] for one in sorted(own, key=lambda one: -one["score"])]
            ranked = predicted.get(before.get(record["layer"]))
            if ranked:
                best = max(zip(record["weights"], record["chosen"]))[1]
                first, judged, used = first + (best == ranked[0]), judged + 1, used + len(record["chosen"])
                at_rank.update(rank for rank, expert in enumerate(ranked, 1) if expert in record["chosen"])
        if not judged or not self.has_scores:
            return None
        n, held = 0, 0
        while held < aim * used and n < max(at_rank, default=0):
            n += 1
            held += at_rank[n]
        return first / judged, n if held >= aim * used else None


def active_of_top(subject, alpha=0.3):
    """Of the experts that the gate predicts as top-score ones (SMoE), the share that the router chooses."""
    layers = [layer["layer"] for layer in subject.header["model"]["layers"]]
    before = dict(zip(layers[1:], layers))
    active, named, predicted = 0, 0, {}
    for line in run("show", subject.evaluation[0]).splitlines():
        record = json.loads(line)
        if record["record"] == "batch":
            predicted = {}
        if record["record"] != "layer" or record["n_tokens"] != 1:
            continue
        own = sorted((one for one in record["predictions"] if one["distance"] == 1), key=lambda one: -one["score"])
        if len(own) > subject.n_used:
            least = (1 + alpha) * own[subject.n_used]["score"]
            predicted[record["layer"]] = {one["expert"] for one in own[: subject.n_used] if one["score"] > least}
        top = predicted.get(before.get(record["layer"]), set())
        active, named = active + len(top & set(record["chosen"])), named + len(top)
    return active / named if named else None


def hobbit_policies(subject):
    print("Penalty of misses (a high load 1, a low one its share of the bytes) in mixed precision, to that of LRU "
          f"(section 5.5.3, figure 18); low versions of {LOW_BYTES} of the bytes in {LOW_SHARE} of the cache, T1 0.6, T2 0.9.\n")
    mixed = ["--low-bytes", LOW_BYTES, "--low-share", LOW_SHARE, *THRESHOLDS, "--upgrade", "off"]
    names = ["lru", "lfu-model", "lfu", "learned", "belady"]
    columns, heading = [], ["policy", "paper"]
    for slots in ("even", "global"):
        for budget in BUDGETS:
            more = [*mixed, "--slots", slots]
            weights = subject.fitted(budget, slots)
            own = replay(subject.evaluation, *more, "--policy-weights", weights, policies="hobbit", budgets=[budget])
            rows = replay(subject.evaluation, *more, policies=",".join(names[:-1]), budgets=[budget])
            column = {name: rows[budget, "none", name] for name in names}
            column["hobbit"] = own[budget, "none", "hobbit"]
            columns.append((column, weights))
            heading.append(f"{slots}, {budget}")
    lines = []
    for name in ["lru", "lfu-model", "lfu", "hobbit", "learned", "belady"]:
        words = {"hobbit": "**hobbit**, fitted weights", "belady": "the optimum, nearly", "lfu-model": "lfu, of the model",
                 "lfu": "lfu, of the sequence"}
        cells = [f"{column[name]['penalty'] / column['lru']['penalty']:.3f}" for column, _ in columns]
        lines.append([words.get(name, name), {"lru": "1"}.get(name, "figure"), *cells])
    below = lambda base: [less(column["hobbit"]["penalty"], column[base]["penalty"]) for column, _ in columns]
    lines.append(["hobbit below lru", "4.69 to 8.68 %", *below("lru")])
    lines.append(["hobbit below lfu of the sequence", "2.13 to 4.19 %", *below("lfu")])
    gain = [f"{100 * (hit_rate(column['lfu']) - hit_rate(column['lfu-model'])):+.1f}" for column, _ in columns]
    lines.append(["hits of lfu: sequence less model, points", "+4.5 %", *gain])
    lines.append(["weights lru,lfu,lhu,fld", "fitted, not told", *(weights for _, weights in columns)])
    table(heading, lines)


def hobbit_thresholds(subject):
    t1, t2 = subject.shares()
    lines = [["T1 / T2 for 67 % high, 30 % low, 3 % skipped", "0.6 / 0.9 (Mixtral)", f"{t1:.2f} / {t2:.2f}"]]
    timed = [*subject.time, *WAITS]
    exact = replay(subject.evaluation, *timed)
    mixed = replay(subject.evaluation, *timed, "--low-bytes", LOW_BYTES, "--low-share", LOW_SHARE, *THRESHOLDS, "--upgrade", "off")
    for budget in BUDGETS:
        base, own = exact[budget, "none", "lru"], mixed[budget, "none", "lru"]
        lines.append([f"decode with dynamic loading, {budget}, simulated", "1.19 to 1.57x", speed(own, base)])
        uses = own["hits"] + own["misses"]
        lines.append([f"uses that came low / were skipped, {budget}", NOT, f"{percent(own['low'] / uses)} / {percent(own['skipped'] / uses)}"])
    return lines


def hobbit_gates(subject):
    lines = []
    for distance, paper in [(1, "96 %"), (2, "about 90 %"), (3, "about 90 %"), (4, NOT)]:
        top = subject.best_scores(distance)
        found = subject.found("stacked-gate", distance)
        if top is not None and found:
            lines.append([f"top-1 foretold {distance} ahead", paper, percent(top[0])])
            lines.append([f"all {subject.n_used} foretold {distance} ahead", NOT, percent(found[0])])
    for mode, paper, more in [
        ("exact", "1.01x, below 1x", []),
        ("mixed", "1.05x", ["--low-bytes", LOW_BYTES, "--low-share", LOW_SHARE, *THRESHOLDS, "--upgrade", "off"]),
    ]:
        bare = replay(subject.evaluation, *subject.time, *WAITS, *more)
        for budget in BUDGETS:
            cells = []
            for distance in range(1, min(subject.distance, 4) + 1):
                words = [*subject.time, *WAITS, *more, "--predictor", "stacked-gate", "--distance", str(distance)]
                words += ["--prefetch", "all"]
                ahead = replay(subject.evaluation, *words, budgets=[budget])[budget, "stacked-gate", "lru"]
                cells.append(f"p = {distance}: {speed(ahead, bare[budget, 'none', 'lru'])}")
            if cells:
                lines.append([f"decode with p gates to none, {mode}, {budget}, simulated", paper, ", ".join(cells)])
    return lines


def edgemoe_policies(subject):
    print("Hit rates in one pool over all layers, nothing preloaded (section IV-B, figure 14: the paper's has the highest of five; "
          "no numbers are told).\n")
    names = ["lru", "lfu", "lfu-model", "edgemoe", "learned", "belady"]
    rows = replay(subject.evaluation, "--slots", "global", policies=",".join(names[:-1]))
    even = replay(subject.evaluation, policies="edgemoe")
    lines = [[name, *(percent(hit_rate(rows[budget, "none", name])) for budget in BUDGETS)] for name in names]
    lines.append(["edgemoe, even slots", *(percent(hit_rate(even[budget, "none", "edgemoe"])) for budget in BUDGETS)])
    table(["policy", *BUDGETS], lines)


def paths(subject):
    """Share of tokens that the most frequent fifth of whole activation paths covers."""
    counted = collections.Counter()
    of_token = []
    for line in run("show", subject.evaluation[0]).splitlines():
        record = json.loads(line)
        if record["record"] == "layer" and record["n_tokens"] == 1:
            of_token.append(tuple(sorted(record["chosen"])))
        elif record["record"] == "batch":
            if len(of_token) == subject.n_layers:
                counted[tuple(of_token)] += 1
            of_token = []
    n, frequent = sum(counted.values()), counted.most_common(max(len(counted) // 5, 1))
    return sum(count for _, count in frequent) / n if n else None


def edgemoe_paths(subject):
    lines = []
    share = paths(subject)
    if share is not None:
        lines.append(["tokens on the most frequent 20 % of paths", "above 99 %", percent(share)])
    found = subject.found("path-table", 1)
    if found:
        lines.append([f"experts that the path table foretells ({found[1]:.1f} named)", "87.1 % (one example)", percent(found[0])])
    calibration = ["--calibration", ",".join(subject.calibration)]
    words = [*subject.time, *calibration, "--predictor", "none,path-table", "--distance", "1"]
    words += ["--prefetch", "top-3", "--slots", "global"]
    rows = replay(subject.evaluation, *words, policies="edgemoe")
    for budget in BUDGETS:
        base, own = rows[budget, "none", "edgemoe"], rows[budget, "path-table", "edgemoe"]
        lines.append([f"preloading, decode to none, {budget}, simulated", "1.29x (0.392 to 0.305 s)", speed(own, base)])
        lines.append([f"bytes read a token to none, {budget}", NOT, f"{own['bytes'] / base['bytes']:.2f}x"])
    return lines


def fate_lines(subject):
    lines = []
    bare, wide = subject.found("stacked-gate", 1), subject.found("cross-layer", 1)
    if bare and wide:
        lines.append([f"gate alone ({bare[1]:.0f} named)", "78.79 %", percent(bare[0])])
        lines.append([f"above the 75th percentile ({wide[1]:.0f} of {subject.n_expert} named)", "97.15 %", percent(wide[0])])
        foretold = subject.best_scores(1)
        if foretold:
            n = foretold[1]
            lines.append(["experts to name for 97 %", f"15 of 60 or 16 of 64", f"{n} of {subject.n_expert}" if n else "more than were recorded"])
    return lines


def fate_slots(subject):
    even = replay(subject.evaluation, policies="lru,arc,learned")
    lines = [["LRU, even, hit rate", *(percent(hit_rate(even[budget, "none", "lru"])) for budget in BUDGETS)]]
    lines.append(["ARC, even", *(percent(hit_rate(even[budget, "none", "arc"])) for budget in BUDGETS)])
    for layers in (1, 3, 4):
        if layers < subject.n_layers:
            rows = replay(subject.evaluation, "--slots", f"shallow-first:{layers}", policies="arc")
            lines.append([f"ARC, first {layers} whole", *(percent(hit_rate(rows[budget, "none", "arc"])) for budget in BUDGETS)])
    if subject.has_scores:
        for name, slots in [("even", "even"), ("first 3 whole", "shallow-first:3")]:
            words = ["--slots", slots, "--predictor", "cross-layer", "--distance", "1", *subject.time]
            words += ["--prefetch", "budget"]
            rows = replay(subject.evaluation, *words, policies="arc")
            cells = [rows[budget, "cross-layer", "arc"] for budget in BUDGETS]
            lines.append([f"ARC, {name}, read ahead by the gate (paper: 99.08 %)", *(percent(hit_rate(row)) for row in cells)])
            bare = replay(subject.evaluation, "--slots", slots, policies="arc")
            ratio = [f"{row['bytes'] / bare[budget, 'none', 'arc']['bytes']:.2f}x" for budget, row in zip(BUDGETS, cells)]
            lines.append([f"bytes read for that, to none ahead, {name}", *ratio])
    lines.append(["learned, even", *(percent(hit_rate(even[budget, "none", "learned"])) for budget in BUDGETS)])
    table(["slots", *BUDGETS], lines)


def use(program, words):
    """Sets the program and the options for all replays; the subjects that are named."""
    global sim, chosen, LOW_BYTES, BUDGETS
    sim = program
    chosen, triples = options(words)
    LOW_BYTES, BUDGETS = chosen["--low-bytes"], chosen["--budgets"].split(",")
    return [Subject(*triple) for triple in triples]


def main():
    global BUDGETS
    if len(sys.argv) < 2:
        sys.exit(__doc__.strip())
    subjects = use(sys.argv[1], sys.argv[2:])
    print("Made by `benches/policies/papers.py` from recorded runs; what differs from the papers is told in "
          "[PAPERS](../../../docs/PAPERS.md).\n")
    for subject in subjects:
        BUDGETS = subject.budgets
        print(f"## {subject.title()}\n")
        print("### HOBBIT\n")
        hobbit_policies(subject)
        table(["loader and predictor", "paper", "here"], hobbit_thresholds(subject) + hobbit_gates(subject))
        print("### EdgeMoE\n")
        edgemoe_policies(subject)
        table(["paths and preloading", "paper", "here"], edgemoe_paths(subject))
        print("### Fate\n")
        lines = fate_lines(subject)
        if lines:
            table(["predictor", "paper", "here"], lines)
        fate_slots(subject)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
