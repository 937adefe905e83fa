// The chat: the conversation that is open, and answers that are being written, of this conversation and of others.

import { add, blank, history, progress } from "./answer.js";
import * as api from "./api.js";
import * as attach from "./attach.js";
import * as message from "./message.js";
import { element } from "./render.js";
import * as settings from "./settings.js";
import * as spoken from "./spoken.js";
import { conversation as fresh, title } from "./store.js";

/** How often an answer is kept while it is written, in milliseconds. */
const KEEP_MS = 2000;
/** How far from the end still counts as being there, in pixels. */
const NEAR_END = 48;

const at = (id) => document.getElementById(id);
const input = at("input");
const scroll = at("scroll");

let open = fresh();
/**
 * Answers being written, by conversation.
 * @type {Map<string, {conversation: object, controller: AbortController, model: string, status: string}>}
 */
const generations = new Map();
let editing = false;
/** The page is being left: its connections end with it, which is no error of an answer's. */
let leaving = false;
let frame = 0;
/** Whether new text is scrolled to. */
let following = true;
let calls;

/**
 * @param {{put: (conversation: object) => void, keep: (conversation: object) => void, draw: () => void,
 *   ready: () => string, failed: (error: Error) => void, began: () => void, model: () => string | undefined}} given
 *   `ready` says why nothing can be asked yet, or nothing
 */
export function start(given) {
  calls = given;
  at("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  input.addEventListener("keydown", (event) => {
    // Enter also ends the composition of a character.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  input.addEventListener("input", grow);
  at("stop").addEventListener("click", () => {
    stop();
    input.focus();
  });
  at("system").addEventListener("input", ({ target }) => {
    open.system = target.value;
    if (open.messages.length > 0) calls.keep(open);
  });
  scroll.addEventListener("scroll", () => {
    at("to-end").hidden = following = nearEnd();
  });
  // Text is formatted later than it comes.
  new ResizeObserver(() => following && toEnd()).observe(at("messages"));
  at("messages").addEventListener("shown", spoken.go);
  at("to-end").addEventListener("click", () => {
    input.focus();
    toEnd();
  });
  addEventListener("pagehide", () => {
    leaving = true;
    for (const { conversation } of generations.values()) calls.keep(conversation);
  });
  // Back from the browser's memory, without its connections: as kept.
  addEventListener("pageshow", ({ persisted }) => persisted && location.reload());
  show(open);
}

/** The conversation that is open. */
export function opened() {
  return open;
}

/** Whether an answer is being written in this conversation. @param {string} id */
export function busy(id) {
  return generations.has(id);
}

/** Whether an answer of this model is being written or waited for. @param {string} model */
export function waitsFor(model) {
  return [...generations.values()].some((generation) => generation.model === model);
}

/** Opens a conversation. */
export function show(conversation) {
  open = conversation;
  editing = false;
  at("system").value = open.system;
  at("messages").replaceChildren(...open.messages.map(message.article));
  draw({ all: true });
  toEnd();
}

/** Opens a new conversation, under the same system prompt. */
export function begin() {
  // An empty one is as good as a new one.
  if (open.messages.length > 0) show(fresh(open.system));
  input.focus();
}

/** Stops the answer that is being written in a conversation. @returns {boolean} whether there was one */
export function stop(id = open.id) {
  const generation = generations.get(id);
  generation?.controller.abort();
  return generation !== undefined;
}

/** Stops without keeping what there is: the conversation was deleted. @param {string} id */
export function forget(id) {
  stop(id);
  generations.delete(id);
}

/** Asks in a new conversation. @param {string} text */
export function demonstrate(text) {
  if (!allowed()) return;
  begin();
  const typed = input.value;
  input.value = text;
  send();
  input.value = typed;
  grow();
}

function send() {
  const text = input.value.trim();
  if ((!text && !attach.any()) || busy(open.id) || !allowed()) return;
  input.value = "";
  grow();
  open.messages.push(attach.message(text));
  open.title ||= title(open.messages.at(-1).content);
  at("messages").append(message.article(open.messages.at(-1)));
  generate();
}

/** Whether something can be asked now; says why not. */
function allowed() {
  const reason = calls.ready();
  const field = settings.invalid();
  if (reason) calls.failed(new Error(reason));
  else if (field) calls.failed(Object.assign(new Error(`${field.name}: ${field.validationMessage}`), { field }));
  return !reason && !field;
}

function again() {
  if (busy(open.id) || !allowed()) return;
  if (open.messages.at(-1)?.role === "assistant") {
    open.messages.pop();
    at("messages").lastChild.remove();
  }
  generate();
  input.focus();
}

/** Asks for the answer to the conversation that is open. */
async function generate() {
  const conversation = open;
  const answer = blank();
  const controller = new AbortController();
  const model = calls.model();
  const generation = { conversation, controller, model, status: "" };
  const body = {
    model,
    messages: history(conversation, conversation.messages.length),
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
    ...settings.parameters(),
  };
  conversation.messages.push(answer);
  generations.set(conversation.id, generation);
  at("messages").append(message.article(answer));
  spoken.begin(at("messages").lastChild);
  calls.put(conversation);
  draw({ all: true });
  toEnd();
  calls.began();

  let kept = performance.now();
  try {
    for await (const chunk of api.chat(body, controller.signal)) {
      add(answer, chunk);
      generation.status = progress(chunk) ?? "";
      if (conversation === open) {
        spoken.prompt(chunk.prompt_progress);
        later();
      }
      if (performance.now() - kept > KEEP_MS) {
        calls.keep(conversation);
        kept = performance.now();
      }
    }
    answer.finish ??= "stop";
  } catch (error) {
    if (leaving) return;
    if (controller.signal.aborted) {
      answer.stopped = true;
    } else {
      answer.error = error.message;
      // Where it is no error of the server's or the network's, it is one of this page's.
      if (error instanceof api.ApiError) calls.failed(error);
      else reportError(error);
    }
  }
  // Deleted meanwhile: nothing is kept.
  if (generations.get(conversation.id) !== generation) return;
  generations.delete(conversation.id);
  calls.put(conversation);
  if (conversation !== open) return;
  draw({ all: true });
  spoken.go();
}

/** Draws with the next frame: chunks come faster than anyone sees them. */
function later() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    draw();
  });
}

function draw({ all = false } = {}) {
  const generation = generations.get(open.id) ?? null;
  const last = open.messages.length - 1;
  const articles = at("messages").children;
  open.messages.forEach((shown, index) => {
    // New text changes the last one only.
    if (!all && index < last) return;
    const actions = [];
    if (!generation && shown.role === "user") actions.push(["Edit", "your message", (button) => edit(index, button)]);
    if (!generation && shown.role === "assistant" && index < last) {
      actions.push(["Branch", "after this answer", () => branch(index + 1)]);
    }
    if (!generation && index === last) {
      actions.push(shown.role === "user" ? ["Answer", "your message", again] : ["Regenerate", "the answer", again]);
    }
    message.update(articles[index], shown, index === last ? generation : null, actions);
  });
  at("empty").hidden = open.messages.length > 0;
  const [shown, other] = generation ? [at("stop"), at("send")] : [at("send"), at("stop")];
  shown.hidden = false;
  // A button that goes leaves the focus at the message.
  if (document.activeElement === other) input.focus();
  other.hidden = true;
}

/** Goes on from the messages before `end` in a new conversation. */
function branch(end) {
  const { title, messages, system } = open;
  show({ ...fresh(system), title, messages: structuredClone(messages.slice(0, end)) });
  calls.put(open);
  spoken.say("This is a new conversation, with the messages up to here.");
  input.focus();
}

/** @param {HTMLButtonElement} button which gets the focus back */
function edit(index, button) {
  if (busy(open.id) || editing) return;
  editing = true;
  const article = at("messages").children[index];
  const field = element("textarea", { value: open.messages[index].content, ariaLabel: "Edit the message" });
  const ask = element("button", { type: "submit", className: "primary", textContent: "Ask again" });
  const cancel = element("button", { type: "button", textContent: "Cancel" });
  const actions = element("div", { className: "actions" }, cancel, ask);
  const form = element("form", { className: "edit", ariaLabel: "Edit the message" }, field, actions);
  const close = () => {
    editing = false;
    form.remove();
    article.classList.remove("editing");
  };
  cancel.addEventListener("click", () => {
    close();
    button.focus();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      cancel.click();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = field.value.trim();
    if (!text || !allowed()) return;
    close();
    const { images } = open.messages[index];
    // What came after an earlier message stays in its own conversation.
    if (index < open.messages.findLastIndex(({ role }) => role === "user")) branch(index);
    open.messages.length = index;
    open.messages.push({ role: "user", content: text, ...(images ? { images } : {}) });
    if (index === 0) open.title = title(text);
    show(open);
    generate();
    input.focus();
  });
  article.classList.add("editing");
  article.prepend(form);
  field.style.height = `${field.scrollHeight + 2}px`;
  field.focus();
}

/** As high as its text, up to what the style allows. */
function grow() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

function nearEnd() {
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_END;
}

function toEnd() {
  scroll.scrollTop = scroll.scrollHeight;
  at("to-end").hidden = following = true;
}
