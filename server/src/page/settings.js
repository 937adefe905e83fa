// The settings of requests and of the page, between their form and localStorage.

import * as api from "./api.js";
import { element } from "./render.js";
import { keepWish, title, wish } from "./store.js";

const KEPT = "hobbit.settings";
const THEME = "hobbit.theme";
const PRESETS = "hobbit.presets";
/** Numbers of a request: name, words, least, most, and "any" or the step. */
const FIELDS = [
  ["temperature", "Temperature", 0, 5],
  ["top_k", "Top-k", 0, 1_000_000, 1],
  ["top_p", "Top-p", 0, 1],
  ["min_p", "Min-p", 0, 1],
  ["max_tokens", "Max tokens", 1, 10_000_000, 1],
  ["seed", "Seed", 0, 4_294_967_295, 1],
];
const MORE = [
  ["dynatemp_range", "Dynamic temperature: range", 0, 5],
  ["dynatemp_exponent", "Dynamic temperature: exponent", 0, 10],
  ["top_n_sigma", "Top-n-sigma", -1, 100],
  ["typical_p", "Typical-p", 0, 1],
  ["xtc_probability", "XTC: probability", 0, 1],
  ["xtc_threshold", "XTC: threshold", 0, 1],
  ["repeat_penalty", "Repeat penalty", 0, 10],
  ["repeat_last_n", "Repeat penalty: tokens", -1, 1_000_000, 1],
  ["presence_penalty", "Presence penalty", -2, 2],
  ["frequency_penalty", "Frequency penalty", -2, 2],
  ["dry_multiplier", "DRY: multiplier", 0, 10],
  ["dry_base", "DRY: base", 0, 10],
  ["dry_allowed_length", "DRY: allowed length", 0, 1_000_000, 1],
  ["dry_penalty_last_n", "DRY: tokens", -1, 1_000_000, 1],
  ["mirostat", "Mirostat (0, 1 or 2)", 0, 2, 1],
  ["mirostat_tau", "Mirostat: entropy", 0, 100],
  ["mirostat_eta", "Mirostat: rate", 0, 1],
  ["adaptive_target", "Adaptive-p: target", -1, 1],
  ["adaptive_decay", "Adaptive-p: decay", 0, 1],
];
const NUMBERS = [...FIELDS, ...MORE].map(([name]) => name);

const form = document.getElementById("settings-form");
const theme = document.getElementById("theme");
const key = document.getElementById("key");

/** Fills the form with what was kept. @param {{keyChanged: () => void}} when */
export function start({ keyChanged }) {
  document.getElementById("sampling").replaceWith(...FIELDS.map(field));
  document.getElementById("more").append(...MORE.map(field));
  try {
    const kept = JSON.parse(wish(KEPT)) ?? {};
    for (const name of [...NUMBERS, "thinking"]) {
      if (typeof kept[name] === "string") form.elements[name].value = kept[name];
    }
  } catch {
    // Not JSON: the form stays empty, which is what the server does by itself.
  }
  theme.value = wish(THEME) ?? "";
  key.value = api.apiKey();
  presets();

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({ target }) => {
    if (!target.name) return;
    const values = [...NUMBERS, "thinking"].map((name) => [name, form.elements[name].value]);
    keepWish(KEPT, JSON.stringify(Object.fromEntries(values.filter(([, value]) => value !== ""))));
  });
  theme.addEventListener("change", () => {
    if (theme.value) document.documentElement.dataset.theme = theme.value;
    else delete document.documentElement.dataset.theme;
    keepWish(THEME, theme.value);
    dispatchEvent(new Event("themechange"));
  });
  key.addEventListener("change", () => {
    api.setApiKey(key.value);
    keyChanged();
  });
}

function field([name, words, min, max, step = "any"]) {
  const inputMode = step === 1 && min >= 0 ? "numeric" : "text";
  return element("label", {}, words, element("input", { name, type: "number", min, max, step, inputMode }));
}

/** System prompts that were saved, by their first lines. */
function presets() {
  const choice = document.getElementById("preset");
  const system = document.getElementById("system");
  const kept = () => {
    try {
      const found = Object.entries(JSON.parse(wish(PRESETS)) ?? {});
      return found.filter(([, text]) => typeof text === "string");
    } catch {
      return [];
    }
  };
  const fill = (chosen = "") => {
    const options = kept().map(([name]) => element("option", { value: name, textContent: name }));
    choice.replaceChildren(element("option", { value: "", textContent: "Saved prompts" }), ...options);
    choice.value = chosen;
    document.getElementById("preset-delete").disabled = choice.value === "";
  };
  const put = (entries, chosen) => {
    keepWish(PRESETS, entries.length > 0 ? JSON.stringify(Object.fromEntries(entries)) : "");
    fill(chosen);
  };
  choice.addEventListener("change", () => {
    const found = kept().find(([name]) => name === choice.value);
    fill(choice.value);
    if (!found) return;
    system.value = found[1];
    system.dispatchEvent(new Event("input"));
  });
  document.getElementById("preset-save").addEventListener("click", () => {
    const name = title(system.value);
    if (name) put([...kept().filter(([other]) => other !== name), [name, system.value]], name);
  });
  document.getElementById("preset-delete").addEventListener("click", () => {
    put(kept().filter(([name]) => name !== choice.value));
  });
  fill();
}

/** Shows what the server does where a field is empty. @param {object} defaults by name */
export function placeholders(defaults) {
  for (const name of NUMBERS) {
    const value = defaults[name === "max_tokens" ? "n_predict" : name];
    // -1 tokens is no limit, and the seed by default is a new one.
    const shown = typeof value === "number" && value >= 0 && name !== "seed" ? String(+value.toFixed(3)) : "";
    form.elements[name].placeholder = shown;
  }
}

/** The first field that holds no number that it may hold, or null. */
export function invalid() {
  return NUMBERS.map((name) => form.elements[name]).find((field) => !field.checkValidity()) ?? null;
}

/** A request's fields for sampling and reasoning. */
export function parameters() {
  const given = {};
  for (const name of NUMBERS) {
    const { value, valueAsNumber } = form.elements[name];
    if (value !== "") given[name] = valueAsNumber;
  }
  const thinking = form.elements.thinking.value;
  if (thinking) given.chat_template_kwargs = { enable_thinking: thinking === "on" };
  return given;
}

/** The field for the key, to put the cursor there. */
export function keyField() {
  return key;
}
