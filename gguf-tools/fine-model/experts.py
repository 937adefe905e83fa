#!/usr/bin/env python3
"""What a model's routers chose, as tables in Markdown: hits of an LRU cache by slots, experts that the next token uses
again, the uneven use of experts. Reads recordings of one token after the other, several at once:

    hobbit-sim show X.trace > X.jsonl; python3 experts.py X.jsonl Y.route.csv ...

X.trace: hobbit-perplexity --trace with -b 512 -ub 1. Y.route.csv: route_trace v1 (turn,phase,step,layer,slot,expert,...).
Every layer has the same number of slots, as in hobbit's even division; a recording begins with an empty cache."""
import argparse, collections, json, sys

SHARES = (12.5, 18.75, 25, 37.5, 50, 62.5, 75, 87.5)


def of_trace(path):
    """(n_expert, [{layer: chosen} of a token])"""
    tokens, n_expert, last = [], 0, None
    for line in open(path):
        if line.startswith('{"record":"layer"'):
            row = json.loads(line)
            if row["n_tokens"] != 1:
                sys.exit(f"{path}: a batch of {row['n_tokens']} tokens: record with -ub 1")
            if last is None or row["layer"] <= last:
                tokens.append({})
            tokens[-1][row["layer"]] = row["chosen"]
            last = row["layer"]
        elif line.startswith('{"record":"header"'):
            n_expert = json.loads(line)["header"]["model"]["layers"][0]["n_expert"]
    return n_expert, tokens


def of_routes(path):
    tokens, n_expert = collections.OrderedDict(), 0
    for line in open(path):
        word = line.strip().split(",")
        if not word[0].isdigit():
            continue
        turn, phase, step, layer, _, expert = map(int, word[:6])
        tokens.setdefault((turn, phase, step), {}).setdefault(layer, []).append(expert)
        n_expert = max(n_expert, expert + 1)
    n_expert = 1 << (n_expert - 1).bit_length()
    return n_expert, list(tokens.values())


def lru(tokens, slots):
    caches, hits, uses = collections.defaultdict(collections.OrderedDict), 0, 0
    for token in tokens:
        for layer, chosen in token.items():
            cache = caches[layer]
            for expert in chosen:
                uses += 1
                hits += expert in cache
            for expert in chosen:
                cache[expert] = True
                cache.move_to_end(expert)
            while len(cache) > slots:
                cache.popitem(last=False)
    return 100 * hits / uses


def again(tokens):
    same = uses = 0
    for one, two in zip(tokens, tokens[1:]):
        for layer in one.keys() & two.keys():
            same += len(set(one[layer]) & set(two[layer]))
            uses += len(two[layer])
    return 100 * same / uses


def use(n_expert, tokens):
    """Least and most used expert as multiples of an equal share; experts of a layer with half of all uses."""
    least, most, half = [], [], []
    for layer in sorted({layer for token in tokens for layer in token}):
        counts = collections.Counter(e for token in tokens for e in token.get(layer, ()))
        every = sorted((counts[e] for e in range(n_expert)), reverse=True)
        equal, total, n = sum(every) / n_expert, 0, 0
        while total < sum(every) / 2:
            total, n = total + every[n], n + 1
        least.append(every[-1] / equal), most.append(every[0] / equal), half.append(n)
    return min(least), max(most), 100 * sum(half) / len(half) / n_expert


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("recordings", nargs="+")
    rows = []
    for path in ap.parse_args().recordings:
        n_expert, tokens = (of_routes if path.endswith(".csv") else of_trace)(path)
        n_used = len(next(iter(tokens[0].values())))
        rows.append((path.rsplit("/", 1)[-1].split(".")[0], n_expert, n_used, tokens))
    print("| recording | experts, used | tokens | again | " + " | ".join(f"{s:g} %" for s in SHARES) + " |")
    print("|---|---|---|---|" + "---|" * len(SHARES))
    for name, n_expert, n_used, tokens in rows:
        hits = [lru(tokens, n) if (n := round(n_expert * s / 100)) >= n_used else None for s in SHARES]
        hits = " | ".join("-" if h is None else f"{h:.1f}" for h in hits)
        print(f"| {name} | {n_expert}, {n_used} | {len(tokens)} | {again(tokens):.1f} | {hits} |")
    print("\n| recording | by chance again | least used | most used | half of the uses |\n|---|---|---|---|---|")
    for name, n_expert, n_used, tokens in rows:
        least, most, half = use(n_expert, tokens)
        print(f"| {name} | {100 * n_used / n_expert:.1f} % | {least:.2f} | {most:.2f} | {half:.0f} % of the experts |")


if __name__ == "__main__":
    main()
