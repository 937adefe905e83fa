// The models of the server: one, or with --models-dir several, of which the user chooses one.

import * as api from "./api.js";
import { element } from "./render.js";
import { keepWish, wish } from "./store.js";

const KEPT = "hobbit.model";

const choice = document.getElementById("models");
/** @type {{id: string, path?: string, status?: {value: "unloaded" | "loading" | "loaded"}}[]} */
let all = [];

/** @param {() => void} changed the user chose another model */
export function start(changed) {
  choice.addEventListener("change", () => {
    keepWish(KEPT, choice.value);
    changed();
  });
}

/** Asks which models there are. @throws {ApiError} */
export async function look() {
  const { data } = await api.get("v1/models");
  all = Array.isArray(data) ? data : [];
  const before = chosen()?.id ?? wish(KEPT);
  const ids = all.map(({ id }) => id);
  if (ids.join("\n") !== [...choice.options].map(({ value }) => value).join("\n")) {
    choice.replaceChildren(...ids.map((id) => element("option", { value: id, textContent: id })));
  }
  choice.value = ids.includes(before) ? before : (all.find(isLoaded) ?? all[0])?.id;
  choice.hidden = all.length < 2;
}

/** The chosen model. */
export function chosen() {
  return all.find(({ id }) => id === choice.value);
}

/** Whether a model is in memory. A server of one model does not say so. */
export function isLoaded(model) {
  return model !== undefined && (model.status?.value ?? "loaded") === "loaded";
}

/** The path of what the chosen model tells about itself, which does not load it. @param {string} path */
export function about(path) {
  const model = chosen();
  return model?.status ? `${path}?${new URLSearchParams({ model: model.id, autoload: "false" })}` : path;
}
