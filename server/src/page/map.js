// Layers x experts on a canvas: one cell per expert, its shape and colour its state.

import { STATES } from "./rates.js";

/** A side of a cell, in pixels: below it nothing is seen, above it nothing is gained. */
const LEAST = 3;
const MOST = 24;

/**
 * How to lay out cells so that they are as large as fits: layers run across where that makes them much larger.
 * @param {number} layers @param {number} experts
 * @param {number} width @param {number} height of the room there is, in pixels
 * @returns {{across: "layers" | "experts", columns: number, rows: number, wide: number, high: number}} `wide` and
 *   `high`: a cell's, in pixels
 */
export function layout(layers, experts, width, height) {
  const [experts_across, layers_across] = [
    { across: "experts", columns: experts, rows: layers },
    { across: "layers", columns: layers, rows: experts },
  ].map((shape) => {
    // Never wider than the room; what is higher is scrolled to.
    const wide = Math.min(width / shape.columns, MOST);
    const high = Math.min(Math.max(height / shape.rows, LEAST), MOST);
    // Neither side more than twice the other.
    return { ...shape, wide: Math.min(wide, 2 * high), high: Math.min(high, Math.max(2 * wide, LEAST)) };
  });
  const least = ({ wide, high }) => Math.min(wide, high);
  return least(layers_across) > 1.25 * least(experts_across) ? layers_across : experts_across;
}

/** Draws one state into the rectangle at (x, y). */
export function drawCell(context, state, x, y, wide, high) {
  const { shape } = STATES[state] ?? STATES["."];
  const size = Math.min(wide, high);
  const line = Math.max(1, Math.round(size / 7));
  const half = Math.ceil(high / 2);
  switch (shape) {
    case "full":
      context.fillRect(x, y, wide, high);
      break;
    case "half":
      context.fillRect(x, y + high - half, wide, half);
      break;
    case "frame":
    case "half-frame": {
      const top = shape === "frame" ? y : y + high - half;
      const height = shape === "frame" ? high : half;
      context.fillRect(x, top, wide, line);
      context.fillRect(x, y + high - line, wide, line);
      context.fillRect(x, top, line, height);
      context.fillRect(x + wide - line, top, line, height);
      break;
    }
    case "ring": {
      context.fillRect(x, y, wide, high);
      const hole = Math.max(1, Math.round(size / 3));
      context.clearRect(x + Math.round((wide - hole) / 2), y + Math.round((high - hole) / 2), hole, hole);
      break;
    }
    default: {
      const dot = Math.max(1, Math.round(size / 5));
      context.fillRect(x + Math.round((wide - dot) / 2), y + Math.round((high - dot) / 2), dot, dot);
    }
  }
}

/** The map in its frame. */
export class ExpertMap {
  #canvas;
  #frame;
  #colors = {};
  #layers = [];
  #experts = 0;
  #shape = null;
  /** Device pixels from one cell to the next. */
  #step = { wide: 0, high: 0 };
  #cursor = null;
  #pointed;
  #laid;

  /**
   * @param {HTMLCanvasElement} canvas @param {HTMLElement} frame it scrolls in
   * @param {(cell: {layer: number, expert: number, state: string, cells: string} | null, at: DOMRect | null,
   *   byKey: boolean) => void} pointed `cells`: the whole layer's
   * @param {(across: "layers" | "experts") => void} laid how the map lies now
   */
  constructor(canvas, frame, pointed, laid) {
    this.#canvas = canvas;
    this.#frame = frame;
    this.#pointed = pointed;
    this.#laid = laid;
    new ResizeObserver(() => this.draw()).observe(frame);
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#leave());
    canvas.addEventListener("blur", () => this.#leave());
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  /** @param {{layer: number, cells: string}[]} layers @param {number} experts */
  set(layers, experts) {
    this.#layers = layers;
    this.#experts = experts;
    this.draw();
  }

  /** @param {Record<string, string>} colors by state's name */
  setColors(colors) {
    this.#colors = colors;
    this.draw();
  }

  draw() {
    const width = this.#frame.clientWidth;
    if (width === 0 || this.#layers.length === 0 || this.#experts === 0) return;
    const room = Number.parseFloat(getComputedStyle(this.#frame).maxHeight) || innerHeight;
    const shape = layout(this.#layers.length, this.#experts, width, room);
    const scale = devicePixelRatio || 1;
    // Whole device pixels: every cell is as large as the next.
    const step = (pixels) => Math.max(1, Math.floor(pixels * scale));
    const [right, down] = [step(shape.wide), step(shape.high)];
    this.#step = { wide: right, high: down };
    if (this.#shape?.across !== shape.across) this.#laid(shape.across);
    this.#shape = shape;
    const canvas = this.#canvas;
    const [wide, high] = [shape.columns * right, shape.rows * down];
    if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
    canvas.style.width = `${wide / scale}px`;
    canvas.style.height = `${high / scale}px`;

    const context = canvas.getContext("2d");
    context.clearRect(0, 0, wide, high);
    const least = Math.min(right, down);
    const gap = least >= 3 ? Math.max(1, Math.round(least / 8)) : 0;
    for (const [state, { name }] of Object.entries(STATES)) {
      context.fillStyle = this.#colors[name] ?? "gray";
      this.#layers.forEach(({ cells }, row) => {
        for (let expert = 0; expert < this.#experts; expert += 1) {
          const cell = cells[expert] in STATES ? cells[expert] : ".";
          if (cell !== state) continue;
          const [column, line] = shape.across === "experts" ? [expert, row] : [row, expert];
          drawCell(context, cell, column * right, line * down, right - gap, down - gap);
        }
      });
    }
    if (this.#cursor) this.#say(this.#cursor.byKey);
  }

  #leave() {
    this.#cursor = null;
    this.#pointed(null, null, false);
  }

  #point(event) {
    if (!this.#shape) return;
    const scale = devicePixelRatio || 1;
    const column = Math.floor((event.offsetX * scale) / this.#step.wide);
    const line = Math.floor((event.offsetY * scale) / this.#step.high);
    const [row, expert] = this.#shape.across === "experts" ? [line, column] : [column, line];
    if (row < 0 || expert < 0 || row >= this.#layers.length || expert >= this.#experts) return this.#leave();
    this.#cursor = { row, expert, byKey: false };
    this.#say(false);
  }

  #key(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const step = steps[event.key];
    if (!step || !this.#shape) return;
    event.preventDefault();
    const [row, expert] = this.#shape.across === "experts" ? [step[1], step[0]] : step;
    const within = (value, end) => Math.min(Math.max(value, 0), end - 1);
    const cursor = this.#cursor ?? { row: -row, expert: -expert };
    this.#cursor = {
      row: within(cursor.row + row, this.#layers.length),
      expert: within(cursor.expert + expert, this.#experts),
      byKey: true,
    };
    this.#say(true);
  }

  #say(byKey) {
    const { row, expert } = this.#cursor;
    const layer = this.#layers[row];
    if (!layer || expert >= this.#experts) return this.#leave();
    const scale = devicePixelRatio || 1;
    const [wide, high] = [this.#step.wide / scale, this.#step.high / scale];
    const [column, line] = this.#shape.across === "experts" ? [expert, row] : [row, expert];
    const state = layer.cells[expert] in STATES ? layer.cells[expert] : ".";
    const { layer: number, cells } = layer;
    this.#pointed({ layer: number, expert, state, cells }, new DOMRect(column * wide, line * high, wide, high), byKey);
  }
}
