// The page: what the server is, which panes are open, and keys.

import * as api from "./api.js";
import * as attach from "./attach.js";
import * as chat from "./chat.js";
import * as experts from "./experts.js";
import { count } from "./format.js";
import * as list from "./list.js";
import * as models from "./models.js";
import * as notice from "./notice.js";
import { element } from "./render.js";
import * as settings from "./settings.js";
import { keepWish, wish } from "./store.js";

const LOADING = "loading the model";
const LOADING_MS = 1000;
const GONE_MS = 3000;
const PANEL = "hobbit.panel";
/** The bundled model's file. */
const DEMO = /(^|[\\/])demo\.gguf$/;

const at = (id) => document.getElementById(id);
/** Where the list has room beside the chat, and where a panel has; as in style.css. */
const wide = matchMedia("(min-width: 68rem)");
const medium = matchMedia("(min-width: 48rem)");

/** Why nothing can be asked yet. */
let waiting = "The server has not answered yet.";
let asking = 0;

// The server.

async function ask() {
  const mine = (asking += 1);
  const again = (wait) => setTimeout(() => mine === asking && ask(), wait);
  try {
    await api.get("health");
    await models.look();
    const model = models.chosen();
    const loaded = models.isLoaded(model);
    const props = loaded ? await api.get(models.about("props")) : {};
    if (mine !== asking) return;
    waiting = "";
    about(model, props);
    experts.wake();
    const loading = model && !loaded && (model.status.value === "loading" || chat.waitsFor(model.id));
    status(loading ? LOADING : "");
    if (loading) again(LOADING_MS);
  } catch (error) {
    if (mine !== asking) return;
    if (error.status === 401) return wantsKey();
    const loading = error.status === 503;
    waiting = loading ? "The model is still being loaded." : error.message;
    status(loading ? LOADING : "cannot be reached");
    again(loading ? LOADING_MS : GONE_MS);
  }
}

/** Shows what the model is. @param {{id: string, path?: string} | undefined} model @param {object} it its properties */
function about(model, it) {
  const name = model?.id ?? "hobbit";
  at("model").textContent = name;
  document.title = name === "hobbit" ? name : `${name} – hobbit`;
  const context = it.default_generation_settings?.n_ctx;
  experts.command(it.model_path ?? model?.path ?? "");
  const demo = DEMO.test(it.model_path ?? "");
  at("empty-words").textContent = demo ? "Begin a text." : "Ask something.";
  at("empty-demo").hidden = !demo;
  attach.takeImages(it.modalities?.vision === true);
  settings.placeholders(it.default_generation_settings?.params ?? {});
  const rows = [
    ["Model", name],
    ["Context", context > 0 ? `${count(context)} tokens` : ""],
    ["Slots", it.total_slots > 0 ? count(it.total_slots) : ""],
    ["Build", it.build_info ?? ""],
  ].filter(([, value]) => value);
  at("server").replaceChildren(
    ...rows.map(([term, value]) =>
      element("div", {}, element("dt", { textContent: term }), element("dd", { textContent: value })),
    ),
  );
}

function status(words) {
  at("status").textContent = words;
}

function wantsKey() {
  notice.show("This server wants an API key.", "Enter it", () => {
    panel("settings");
    settings.keyField().focus();
  });
}

/** A failure of the chat. */
function failed(error) {
  if (error.field) {
    panel("settings");
    error.field.focus();
  }
  if (error.status === 401) wantsKey();
  // An answer shows its own error; what has no answer yet is told here.
  else if (!(error instanceof api.ApiError)) notice.show(error.message);
  else if (error.status === 0 || error.status === 503) ask();
}

// Panes.

function panel(name) {
  for (const id of ["experts", "settings"]) {
    if (id !== name) leave(id);
    at(`show-${id}`).ariaExpanded = String(id === name);
    if (id === "experts") experts.show(id === name);
    else at(id).hidden = id !== name;
  }
  cover();
  // An empty wish would not be kept, and the experts would open.
  keepWish(PANEL, name || "none");
}

function listPane(shown) {
  if (!shown) leave("list-pane");
  at("list-pane").hidden = !shown;
  at("show-list").ariaExpanded = String(shown);
  cover();
}

/** A pane that closes leaves the focus on the button that opens it. */
function leave(id) {
  if (at(id).contains(document.activeElement)) document.querySelector(`[aria-controls="${id}"]`).focus();
}

/** What lies under an open pane cannot be reached. */
function cover() {
  const isOpen = (id) => !at(id).hidden;
  const panelOver = !medium.matches && ["experts", "settings"].some(isOpen);
  const listOver = !wide.matches && isOpen("list-pane");
  at("chat").inert = panelOver || listOver;
  for (const id of ["experts", "settings"]) at(id).inert = listOver;
}

function toggle(name) {
  panel(at(name).hidden ? name : "");
  if (at(name).hidden) return;
  if (!wide.matches) listPane(false);
  at(name).focus();
}

/** Closes what lies over the chat. */
function closeOver() {
  if (!wide.matches) listPane(false);
  if (!medium.matches) panel("");
}

// Conversations: the one that is open is in the address, so that it is open again after a reload.

function openConversation(conversation) {
  chat.show(conversation);
  history.replaceState(null, "", `#${conversation.id}`);
  list.draw();
  if (!wide.matches) listPane(false);
}

function newConversation() {
  closeOver();
  chat.begin();
  history.replaceState(null, "", location.pathname + location.search);
  list.draw();
}

notice.start();
attach.start();
list.start({
  open: (conversation) => {
    openConversation(conversation);
    at("input").focus();
  },
  opened: chat.opened,
  removed: (conversation) => {
    chat.forget(conversation.id);
    if (chat.opened().id === conversation.id) newConversation();
  },
  busy: chat.busy,
});
settings.start({
  keyChanged: () => {
    notice.close();
    ask();
  },
});
chat.start({
  put: (conversation) => {
    if (conversation === chat.opened()) history.replaceState(null, "", `#${conversation.id}`);
    list.put(conversation);
  },
  keep: list.keep,
  draw: list.draw,
  ready: () => waiting,
  failed,
  began: () => {
    experts.wake();
    // Another model may have taken its place.
    if (models.chosen()?.status) ask();
  },
  model: () => models.chosen()?.id,
});
models.start(() => {
  experts.wake();
  ask();
});
experts.start({ demonstrate: () => chat.demonstrate("What is the best book?"), look: ask });

const linked = () => list.find(location.hash.slice(1));
if (linked()) openConversation(linked());
addEventListener("hashchange", () => {
  if (linked() && linked() !== chat.opened()) openConversation(linked());
});

at("new").addEventListener("click", newConversation);
at("show-list").addEventListener("click", () => {
  listPane(at("list-pane").hidden);
  if (!medium.matches) panel("");
  at("list-pane").focus();
});
// A click beside the open list lands here: what it would hit is inert.
at("panes").addEventListener("click", ({ target }) => target === at("panes") && listPane(false));
for (const name of ["experts", "settings"]) at(`show-${name}`).addEventListener("click", () => toggle(name));
wide.addEventListener("change", () => listPane(wide.matches));
medium.addEventListener("change", () => panel(medium.matches ? "experts" : ""));

// A pane that a pointer opened gets the focus without a frame; keys bring the frame back.
addEventListener("pointerdown", () => document.documentElement.classList.add("pointed"), true);
addEventListener("keydown", () => document.documentElement.classList.remove("pointed"), true);

addEventListener("keydown", (event) => {
  if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey) {
    event.preventDefault();
    newConversation();
  } else if (event.key === "Escape" && !event.isComposing && !chat.stop()) {
    closeOver();
  }
});

listPane(wide.matches);
panel(medium.matches ? (wish(PANEL) ?? "experts") : "");
ask();
