// Rates between two answers of /experts, and counts of one. Pure.

/** Meanings of the characters in a layer's cells. `shape` is drawn: colour is not the only mark. */
export const STATES = {
  H: { name: "high", words: "in memory, high precision", shape: "full" },
  L: { name: "low", words: "in memory, low precision", shape: "half" },
  h: { name: "reading", words: "being read, high precision", shape: "frame" },
  l: { name: "reading", words: "being read, low precision", shape: "half-frame" },
  D: { name: "device", words: "on a device", shape: "ring" },
  ".": { name: "absent", words: "not in memory", shape: "dot" },
};

/** How many experts are in each state. @param {{cells: string}[]} layers */
export function counts(layers) {
  const found = Object.fromEntries(Object.keys(STATES).map((state) => [state, 0]));
  for (const { cells } of layers) {
    for (const cell of cells) found[cell in found ? cell : "."] += 1;
  }
  return found;
}

/** A span of time over which rates are taken, in milliseconds. */
const WINDOW_MS = 3000;

/** How many answers with new tokens the timeline shows. */
const TIMELINE = 120;

/** Rates over the last seconds, from totals that only grow. */
export class Rates {
  #polls = [];
  /** The latest rates of a time when tokens were made; null before there was one. */
  latest = null;
  /** Whether tokens were made in the window. */
  moving = false;
  /** Bytes read per token between one answer and the next, where there were tokens; the latest last. */
  timeline = [];

  /** @param {object} totals those of /experts @param {number} now milliseconds */
  add(totals, now) {
    const last = this.#polls.at(-1);
    // Totals that shrink are another process's.
    if (last && (totals.tokens < last.totals.tokens || totals.bytes_read < last.totals.bytes_read)) {
      this.#polls = [];
      this.latest = null;
      this.timeline = [];
    }
    const fresh = last ? totals.tokens - last.totals.tokens : 0;
    if (fresh > 0 && this.#polls.length > 0) {
      this.timeline.push((totals.bytes_read - last.totals.bytes_read) / fresh);
      this.timeline = this.timeline.slice(-TIMELINE);
    }
    this.#polls.push({ totals, now });
    // One that is older than the window stays, as its beginning.
    while (this.#polls.length > 2 && now - this.#polls[1].now >= WINDOW_MS) this.#polls.shift();
    const first = this.#polls[0];
    const since = (name) => totals[name] - first.totals[name];
    const tokens = since("tokens");
    this.moving = tokens > 0;
    if (!this.moving) return;
    const demands = since("hits") + since("misses");
    this.latest = {
      hit_rate: demands > 0 ? since("hits") / demands : null,
      bytes_per_token: since("bytes_read") / tokens,
      ms_per_token: (since("seconds") * 1000) / tokens,
      wait_ms_per_token: (since("io_wait_seconds") * 1000) / tokens,
      tokens_per_second: (tokens * 1000) / (now - first.now),
    };
  }
}
