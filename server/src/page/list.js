// The conversations beside the chat: open, rename, delete, export and import.

import * as notice from "./notice.js";
import { element } from "./render.js";
import * as store from "./store.js";

const at = (id) => document.getElementById(id);

/** The latest first. @type {store.Conversation[]} */
let conversations = [];
let renaming = null;
let told = "";
let calls;

/**
 * @param {{open: (conversation: store.Conversation) => void, opened: () => store.Conversation,
 *   removed: (conversation: store.Conversation) => void, busy: (id: string) => boolean}} given
 */
export function start(given) {
  calls = given;
  try {
    const { conversations: kept, unreadable } = store.load();
    conversations = kept;
    if (unreadable > 0)
      notice.show(`Kept conversations that cannot be read: ${unreadable}. They are left as they are.`);
  } catch (error) {
    notice.show(error.message);
  }
  store.watch(fromAnotherTab);
  at("search").addEventListener("input", draw);
  at("export").addEventListener("click", download);
  at("import").addEventListener("click", () => at("import-file").click());
  at("import-file").addEventListener("change", upload);
  draw();
}

/** @param {string} id */
export function find(id) {
  return conversations.find((conversation) => conversation.id === id) ?? null;
}

/** Keeps a conversation; what was just written to comes first. @param {store.Conversation} conversation */
export function put(conversation, { touch = true } = {}) {
  if (touch) conversation.updated = Date.now();
  conversations = [conversation, ...conversations.filter(({ id }) => id !== conversation.id)];
  conversations.sort((a, b) => b.updated - a.updated);
  keep(conversation);
  draw();
}

/** Keeps what an answer has so far. @param {store.Conversation} conversation */
export function keep(conversation) {
  try {
    store.save(conversation);
    told = "";
  } catch (error) {
    // Once, not with every word of an answer.
    if (told !== error.message) notice.show(error.message);
    told = error.message;
  }
}

export function draw() {
  const opened = calls.opened()?.id;
  const words = at("search").value.trim().toLowerCase();
  const has = ({ title, messages }) =>
    [title, ...messages.map(({ content }) => content)].some((text) => text.toLowerCase().includes(words));
  const found = words ? conversations.filter(has) : conversations;
  const line = document.activeElement?.closest("#list li");
  const place = [...at("list").children].indexOf(line);
  const button = line ? [...line.querySelectorAll("button")].indexOf(document.activeElement) : -1;
  at("list").replaceChildren(...found.map((conversation) => item(conversation, opened)));
  if (line) refocus(line.dataset.id, place, Math.max(button, 0));
  at("export").disabled = conversations.length === 0;
  const field = at("list").querySelector("input");
  field?.focus();
  field?.select();
}

/** Puts the focus where it was before the list was drawn, or on what took that place. */
function refocus(id, place, button) {
  const lines = [...at("list").children];
  const same = lines.find((line) => line.dataset.id === id);
  const next = (same ?? lines[Math.min(place, lines.length - 1)])?.querySelectorAll("button");
  (next?.[same ? button : 0] ?? at("new")).focus();
}

function item(conversation, opened) {
  if (conversation.id === renaming) {
    const line = element("li", {}, field(conversation));
    line.dataset.id = conversation.id;
    return line;
  }
  const words = conversation.title || "Untitled";
  const open = element("button", { type: "button", className: "open", textContent: words, title: words });
  open.addEventListener("click", () => calls.open(conversation));
  const rename = element("button", { type: "button", className: "quiet small", textContent: "Rename" });
  rename.ariaLabel = `Rename ${words}`;
  rename.addEventListener("click", () => {
    renaming = conversation.id;
    draw();
  });
  const remove = element("button", { type: "button", className: "quiet small", textContent: "Delete" });
  remove.ariaLabel = `Delete ${words}`;
  remove.addEventListener("click", () => drop(conversation));
  const line = element("li", {}, open, element("span", { className: "tools" }, rename, remove));
  line.dataset.id = conversation.id;
  line.classList.toggle("busy", calls.busy(conversation.id));
  if (conversation.id === opened) open.setAttribute("aria-current", "true");
  return line;
}

function field(conversation) {
  const input = element("input", { value: conversation.title, ariaLabel: "Name of the conversation", maxLength: 200 });
  const done = (keepName) => {
    // Taking the field away blurs it.
    if (renaming !== conversation.id) return;
    renaming = null;
    const name = input.value.trim();
    if (keepName && name && name !== conversation.title) {
      conversation.title = name;
      put(conversation, { touch: false });
    } else {
      draw();
    }
  };
  input.addEventListener("blur", () => done(true));
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.stopPropagation();
    done(event.key === "Enter");
  });
  return input;
}

function drop(conversation) {
  conversations = conversations.filter(({ id }) => id !== conversation.id);
  store.remove(conversation.id);
  calls.removed(conversation);
  draw();
  notice.show(`Deleted: ${conversation.title || "Untitled"}.`, "Undo", () => put(conversation, { touch: false }));
}

function fromAnotherTab(id) {
  // The text being written here is newer than the stored one.
  if (calls.busy(id)) return;
  const kept = store.one(id);
  conversations = conversations.filter((conversation) => conversation.id !== id);
  if (kept) {
    conversations = [kept, ...conversations].sort((a, b) => b.updated - a.updated);
    if (calls.opened()?.id === id) calls.open(kept);
  }
  draw();
}

function download() {
  const address = URL.createObjectURL(new Blob([store.exported(conversations)], { type: "application/json" }));
  const day = new Date().toISOString().slice(0, 10);
  element("a", { href: address, download: `hobbit-conversations-${day}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

async function upload() {
  const [file] = at("import-file").files;
  at("import-file").value = "";
  if (!file) return;
  try {
    if (file.size > store.IMPORT_LIMIT) throw new store.StoreError("The file is larger than 32 MiB.");
    const added = store.beside(store.imported(await file.text()), conversations);
    // All are here now, also where the browser has no room to keep them: exporting loses none.
    conversations = [...added, ...conversations].sort((a, b) => b.updated - a.updated);
    notice.show(added.length === 0 ? "Nothing in the file is new." : `Imported: ${added.length}.`);
    for (const conversation of added) keep(conversation);
    draw();
  } catch (error) {
    notice.show(`Not imported: ${error.message}`);
  }
}
