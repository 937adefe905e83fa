// What the browser keeps for the page: conversations, one entry of localStorage each, and wishes.

const PREFIX = "hobbit.conversation.";
const FORMAT = "hobbit_conversations";
const VERSION = 1;
/** The largest file that is imported, in bytes. Browsers keep about 5 MB per site. */
export const IMPORT_LIMIT = 32 << 20;

/**
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title empty until it has a message
 * @property {number} updated milliseconds since 1970
 * @property {string} system the system prompt
 * @property {import("./answer.js").Message[]} messages
 */

/** @param {string} [system] @returns {Conversation} */
export function conversation(system = "") {
  return { id: id(), title: "", updated: Date.now(), system, messages: [] };
}

// Not crypto.randomUUID: over plain HTTP there is none.
function id() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A conversation's title from its first message. @param {string} text */
export function title(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

/** A wish about the page, as it was kept; null where it was not. @param {string} name */
export function wish(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

/** Keeps a wish; none if it is empty. Where nothing can be kept it lasts as long as the page. */
export function keepWish(name, value) {
  try {
    if (value) localStorage.setItem(name, value);
    else localStorage.removeItem(name);
  } catch {
    // Told when conversations are kept.
  }
}

/** Conversations could not be kept or read; the message says what to do. */
export class StoreError extends Error {}

/**
 * Every conversation that is kept, the latest first, and how many entries could not be read. Those stay where they are.
 * @returns {{conversations: Conversation[], unreadable: number}}
 */
export function load() {
  const conversations = [];
  let unreadable = 0;
  try {
    for (const key of Object.keys(localStorage).filter((key) => key.startsWith(PREFIX))) {
      const kept = one(key.slice(PREFIX.length));
      if (kept) conversations.push(kept);
      else unreadable += 1;
    }
  } catch {
    throw new StoreError("This browser keeps nothing for this page: conversations are gone when it is closed.");
  }
  return { conversations: conversations.sort((a, b) => b.updated - a.updated), unreadable };
}

/** One conversation as it is kept; null where it is not, or cannot be read. @param {string} id */
export function one(id) {
  try {
    const kept = checked(JSON.parse(localStorage.getItem(PREFIX + id)));
    return kept.id === id ? kept : null;
  } catch {
    return null;
  }
}

/** Keeps a conversation. @param {Conversation} conversation @throws {StoreError} */
export function save(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
  } catch (error) {
    throw new StoreError(
      error.name === "QuotaExceededError"
        ? "The browser's storage is full: what is new is not kept. Export conversations, then delete some."
        : "This browser keeps nothing for this page: conversations are gone when it is closed.",
    );
  }
}

/** @param {string} id */
export function remove(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // Where nothing can be stored, nothing was.
  }
}

/** Calls `changed` with the id of a conversation that another tab keeps or deletes. */
export function watch(changed) {
  addEventListener("storage", ({ key }) => {
    if (key?.startsWith(PREFIX)) changed(key.slice(PREFIX.length));
  });
}

/** The text of a file with these conversations. @param {Conversation[]} conversations */
export function exported(conversations) {
  return JSON.stringify({ [FORMAT]: VERSION, conversations }, null, 1);
}

/** The conversations of such a file. @param {string} text @throws {StoreError} that says where it is none */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new StoreError("The file is not JSON.");
  }
  if (!Array.isArray(file?.conversations) || !(FORMAT in file)) {
    throw new StoreError(`The file has no conversations of this page (${FORMAT} is missing).`);
  }
  if (file[FORMAT] !== VERSION) {
    throw new StoreError(`The file's version is ${JSON.stringify(file[FORMAT])}; this page reads ${VERSION}.`);
  }
  return file.conversations.map((value, index) => {
    try {
      return checked(value);
    } catch (error) {
      throw new StoreError(`Conversation ${index + 1} of the file: ${error.message}`);
    }
  });
}

/**
 * Conversations of a file beside those there are: one that is here already, word for word, is left out; one whose id
 * is taken by another gets a new one.
 * @param {Conversation[]} found @param {Conversation[]} here
 */
export function beside(found, here) {
  const text = new Map(here.map((conversation) => [conversation.id, JSON.stringify(conversation)]));
  const added = [];
  for (const conversation of found) {
    if (text.get(conversation.id) === JSON.stringify(conversation)) continue;
    const fresh = text.has(conversation.id) ? { ...conversation, id: id() } : conversation;
    text.set(fresh.id, JSON.stringify(fresh));
    added.push(fresh);
  }
  return added;
}

// Takes what it knows and no more: a file, or an entry of storage, may hold anything.
function checked(value) {
  const need = (holds, what) => {
    if (!holds) throw new StoreError(`${what} is missing or of the wrong type.`);
  };
  const optional = (from, name, type) => {
    need(from[name] === undefined || typeof from[name] === type, name);
    return from[name] === undefined ? {} : { [name]: from[name] };
  };
  need(value !== null && typeof value === "object", "the conversation");
  need(typeof value.id === "string" && /^[0-9a-zA-Z-]{1,64}$/.test(value.id), "id");
  need(typeof value.title === "string", "title");
  need(Number.isFinite(value.updated), "updated");
  need(typeof value.system === "string", "system");
  need(Array.isArray(value.messages), "messages");
  const messages = value.messages.map((message) => {
    need(message !== null && typeof message === "object", "a message");
    need(message.role === "user" || message.role === "assistant", "a message's role");
    need(typeof message.content === "string", "a message's content");
    need(message.tools === undefined || Array.isArray(message.tools), "tools");
    for (const tool of message.tools ?? []) {
      need(typeof tool?.name === "string" && typeof tool.arguments === "string", "a tool call");
    }
    const isImage = (image) => typeof image === "string" && image.startsWith("data:image/");
    need(message.images === undefined || (Array.isArray(message.images) && message.images.every(isImage)), "images");
    const tools = message.tools?.map(({ name, arguments: given }) => ({ name, arguments: given }));
    return {
      role: message.role,
      content: message.content,
      ...(message.images ? { images: message.images } : {}),
      ...optional(message, "reasoning", "string"),
      ...(tools ? { tools } : {}),
      ...optional(message, "finish", "string"),
      ...optional(message, "stopped", "boolean"),
      ...optional(message, "error", "string"),
      ...(message.timings && typeof message.timings === "object" ? { timings: message.timings } : {}),
      ...(message.usage && typeof message.usage === "object" ? { usage: message.usage } : {}),
    };
  });
  const { id, title, updated, system } = value;
  return { id, title, updated, system, messages };
}
