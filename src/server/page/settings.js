// The settings of requests and of the page, between their form and localStorage.

import * as api from "./api.js";

const KEPT = "hobbit.settings";
const THEME = "hobbit.theme";
const NUMBERS = ["temperature", "top_k", "top_p", "min_p", "max_tokens", "seed"];

const form = document.getElementById("settings-form");
const theme = document.getElementById("theme");
const key = document.getElementById("key");

function keep(name, value) {
  try {
    if (value) localStorage.setItem(name, value);
    else localStorage.removeItem(name);
  } catch {
    // Told when conversations are kept; settings last as long as the page.
  }
}

/** Fills the form with what was kept. @param {{keyChanged: () => void}} when */
export function start({ keyChanged }) {
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT)) ?? {};
    for (const name of [...NUMBERS, "thinking"]) {
      if (typeof kept[name] === "string") form.elements[name].value = kept[name];
    }
    theme.value = localStorage.getItem(THEME) ?? "";
  } catch {
    // Nothing was kept that can be read: the form stays empty, which is what the server does by itself.
  }
  key.value = api.apiKey();

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({ target }) => {
    if (!target.name) return;
    const values = [...NUMBERS, "thinking"].map((name) => [name, form.elements[name].value]);
    keep(KEPT, JSON.stringify(Object.fromEntries(values.filter(([, value]) => value !== ""))));
  });
  theme.addEventListener("change", () => {
    if (theme.value) document.documentElement.dataset.theme = theme.value;
    else delete document.documentElement.dataset.theme;
    keep(THEME, theme.value);
    dispatchEvent(new Event("themechange"));
  });
  key.addEventListener("change", () => {
    api.setApiKey(key.value);
    keyChanged();
  });
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
