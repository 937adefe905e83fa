// The panel about the experts: polls /experts while someone sees it.

import * as api from "./api.js";
import { bytes, count, counted, percent, short } from "./format.js";
import { ExpertMap, drawCell } from "./map.js";
import * as models from "./models.js";
import { counts, Rates, STATES } from "./rates.js";
import { copyText, element } from "./render.js";
import { keepWish, wish } from "./store.js";

const BUSY_MS = 500;
const IDLE_MS = 2000;
const TROUBLE_MS = 5000;

/** Fewer bars leave room for more. */
const LEAST_BARS = 30;

const WIDE = "hobbit.wide";

const at = (id) => document.getElementById(id);
const panel = at("experts");

let map;
let rates = new Rates();
/** Where they come from: each model has its own. */
let source = "";
let timer = 0;
let polling = null;
let look;
let open = false;
/** The last cell that was named to screen readers, and its layer. */
let [said, saidLayer] = ["", -1];
/** When something began: the server says so a little later. */
let woken = -Infinity;

/**
 * Prepares the panel.
 * @param {{demonstrate: () => void, look: () => void}} given `demonstrate` asks something, `look` asks for the models
 */
export function start({ demonstrate, look: again }) {
  look = again;
  map = new ExpertMap(at("map"), at("map-frame"), pointed, laid);
  legend();
  for (const scheme of ["light", "dark"]) {
    matchMedia(`(prefers-color-scheme: ${scheme})`).addEventListener("change", colors);
  }
  addEventListener("themechange", colors);
  widen(wish(WIDE) === "yes");
  at("widen").addEventListener("click", () => widen(!panel.classList.contains("wide")));
  at("see").addEventListener("click", demonstrate);
  at("copy-command").addEventListener("click", ({ target }) => copyText(at("command").textContent, target));
  document.addEventListener("visibilitychange", poll);
  poll();
}

/** How to start the server so that there is something to see. @param {string} model its file */
export function command(model) {
  const quoted = /^[\w./-]+$/.test(model) ? model : `'${model.replaceAll("'", "'\\''")}'`;
  at("command").textContent = `hobbit-server -m ${quoted} --expert-cache 50%`;
}

/** Gives the map more room, or takes it back. */
function widen(wide) {
  panel.classList.toggle("wide", wide);
  at("widen").ariaPressed = String(wide);
  keepWish(WIDE, wide ? "yes" : "no");
}

/** The panel was opened or closed. @param {boolean} shown */
export function show(shown) {
  open = shown;
  panel.hidden = !shown;
  if (shown) colors();
  poll();
}

/** Something began that the panel should show at once. */
export function wake() {
  woken = performance.now();
  poll();
}

async function poll() {
  clearTimeout(timer);
  polling?.abort();
  polling = null;
  if (!open || document.visibilityState !== "visible") return;
  const model = models.chosen();
  if (!model) return;
  if (!models.isLoaded(model)) return none("This model is not in memory. A message loads it.");
  const mine = (polling = new AbortController());
  let [next, wait] = [poll, TROUBLE_MS];
  const path = models.about("experts");
  if (source !== path) rates = new Rates();
  source = path;
  try {
    const answer = await api.get(path, mine.signal);
    if (mine !== polling) return;
    draw(answer);
    const { processing, waiting } = answer.requests ?? {};
    wait = processing > 0 || waiting > 0 || performance.now() - woken < IDLE_MS ? BUSY_MS : IDLE_MS;
  } catch (error) {
    if (mine !== polling) return;
    none(error.message);
    // Of several models this one was unloaded meanwhile.
    if (error.status === 400) next = look;
  }
  timer = setTimeout(next, wait);
}

/** There are no figures. @param {string} why */
function none(why) {
  at("experts-live").hidden = at("see").hidden = at("experts-how").hidden = true;
  at("experts-none").hidden = false;
  at("experts-none").textContent = why;
  slots([]);
}

function draw(answer) {
  const layers = (Array.isArray(answer.layers) ? answer.layers : []).filter(({ cells }) => typeof cells === "string");
  const managed = answer.managed === true && layers.length > 0;
  at("experts-live").hidden = at("see").hidden = !managed;
  at("experts-none").hidden = managed;
  at("experts-none").textContent =
    "The whole model is in memory: llama.cpp runs it by itself, and there are no experts to read.";
  at("experts-how").hidden = managed;
  if (managed) {
    rates.add(answer.totals, performance.now());
    figures(answer);
    timeline();
    const experts = Number.isInteger(answer.n_expert) ? answer.n_expert : layers[0].cells.length;
    map.set(layers, experts);
    summary(answer, layers);
  }
  slots(Array.isArray(answer.slots) ? answer.slots : []);
}

function figures({ totals, requests, prefetch, capacity_bytes, expert_bytes }) {
  const now = rates.latest;
  const overall = totals.hits + totals.misses;
  const rows = [
    [
      "Hits",
      now?.hit_rate == null ? "–" : percent(now.hit_rate),
      overall > 0 && `${percent(totals.hits / overall)} since start`,
    ],
    [
      "Read per token",
      now ? bytes(now.bytes_per_token) : "–",
      totals.tokens > 0 && `${bytes(totals.bytes_read)} in all`,
    ],
    [
      "Time per token",
      now ? `${short(now.ms_per_token)} ms` : "–",
      now && `disk ${short(now.wait_ms_per_token)} ms`,
    ],
    ...(prefetch
      ? [["Read ahead", counted(prefetch.issued, "expert"), `${count(prefetch.useful + prefetch.late)} were used`]]
      : []),
    ["Room for experts", bytes(capacity_bytes), `of ${bytes(expert_bytes)}`],
    ["Requests", count(requests?.processing ?? 0), `${count(requests?.waiting ?? 0)} waiting`],
  ];
  at("rates").classList.toggle("resting", !rates.moving);
  at("rates").replaceChildren(
    ...rows.map(([name, value, note]) =>
      element(
        "div",
        {},
        element("dt", { textContent: name }),
        element("dd", {}, element("b", { textContent: value }), note ? element("small", { textContent: note }) : ""),
      ),
    ),
  );
}

/** One bar per answer of the server in which there were new tokens. */
function timeline() {
  const values = rates.timeline;
  at("timeline-frame").hidden = values.length === 0;
  const most = Math.max(...values, 1);
  const across = Math.max(values.length, LEAST_BARS);
  const bar = (value, index) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const high = (value / most) * 40;
    const place = { x: index, y: 40 - high, width: 0.8, height: high };
    for (const [name, number] of Object.entries(place)) made.setAttribute(name, number);
    return made;
  };
  at("timeline").setAttribute("viewBox", `0 0 ${across} 40`);
  at("timeline").replaceChildren(...values.map(bar));
  at("timeline-words").textContent =
    `Read per token over time: now ${bytes(values.at(-1) ?? 0)}, at most ${bytes(most)}`;
}

function summary({ n_expert_used }, layers) {
  const found = counts(layers);
  const reading = found.h + found.l;
  const total = Object.values(found).reduce((sum, number) => sum + number, 0);
  const here = found.H + found.L;
  const parts = [
    `${count(here)} of ${count(total)} experts are in memory`,
    found.L > 0 ? `, ${count(found.L)} of them in low precision` : "",
    found.D > 0 ? `; ${count(found.D)} on a device` : "",
    reading > 0 ? `; ${count(reading)} being read` : "",
    ".",
  ];
  at("map-summary").textContent = parts.join("");
  for (const item of at("legend").children) item.querySelector("small").textContent = count(found[item.dataset.state]);
  at("map-used").textContent = n_expert_used > 0 ? `; a token uses ${count(n_expert_used)} per layer.` : ".";
}

function laid(across) {
  at("map-across").textContent = across === "layers" ? "Layers across, experts down" : "Experts across, layers down";
}

/** How far a prompt is. @param {{total: number, processed: number, seconds_left: ?number}} prompt */
function reading({ total, processed, seconds_left }) {
  const left = seconds_left === null ? "" : `, about ${counted(Math.ceil(seconds_left), "second")} left`;
  return `reads its prompt: ${count(processed)} of ${count(total)} tokens${left}`;
}

function slots(list) {
  at("slots-title").hidden = list.length === 0;
  at("slots").replaceChildren(
    ...list.map((slot) => {
      const used = slot.n_past ?? 0;
      const busy = () => (slot.prompt ? reading(slot.prompt) : `busy, ${counted(slot.n_decoded ?? 0, "token")} so far`);
      const words = slot.is_processing ? busy() : "free";
      return element(
        "li",
        { className: slot.is_processing ? "busy" : "" },
        element("span", {}, element("span", { className: "hidden", textContent: "Slot " }), `${slot.id}`),
        element("span", { textContent: words }),
        element("meter", { min: 0, max: slot.n_ctx || 1, value: used, ariaLabel: "context used" }),
        element("small", { textContent: `${count(used)} of ${count(slot.n_ctx ?? 0)}` }),
      );
    }),
  );
}

function legend() {
  at("legend").replaceChildren(
    ...Object.entries(STATES).map(([state, { name, words }]) => {
      const swatch = element("canvas", { width: 28, height: 28, className: `swatch ${name}`, ariaHidden: "true" });
      const item = element("li", {}, swatch, element("span", { textContent: words }), element("small"));
      item.dataset.state = state;
      return item;
    }),
  );
}

/** Takes the colours of the style sheet over into canvases. */
function colors() {
  if (panel.hidden) return;
  const found = {};
  for (const item of at("legend").children) {
    const canvas = item.querySelector("canvas");
    const { name } = STATES[item.dataset.state];
    found[name] = getComputedStyle(canvas).color;
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, 28, 28);
    context.fillStyle = found[name];
    drawCell(context, item.dataset.state, 2, 2, 24, 24);
  }
  map.setColors(found);
}

function pointed(cell, where, byKey) {
  const tip = at("map-tip");
  tip.hidden = !cell;
  if (!cell) {
    at("map-cell").textContent = said = "";
    saidLayer = -1;
    return;
  }
  const words = `Layer ${cell.layer}, expert ${cell.expert}: ${STATES[cell.state].words}`;
  tip.textContent = words;
  if (byKey && said !== words) {
    // What a row or column looks like, when it is entered.
    const { H, L } = counts([cell]);
    const layer = `. ${count(H + L)} of the layer's ${count(cell.cells.length)} are in memory`;
    at("map-cell").textContent = words + (cell.layer === saidLayer ? "" : layer);
    [said, saidLayer] = [words, cell.layer];
  }
  const frame = at("map-frame");
  const left = Math.min(Math.max(0, where.x - tip.offsetWidth / 2), Math.max(0, frame.clientWidth - tip.offsetWidth));
  const above = where.y - frame.scrollTop > tip.offsetHeight + 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above ? where.y - tip.offsetHeight - 6 : where.bottom + 6}px`;
}
