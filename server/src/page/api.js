// The server's interface: requests with the key, errors in words, and streams of events.

// Of the directory above this file's, so that a prefix in front of the server's paths does no harm.
const root = new URL("../", import.meta.url);

const KEY = "hobbit.key";
let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // Nothing may be stored here: the key lasts as long as the page.
}

export function apiKey() {
  return key;
}

/** Keeps the key for as long as the tab is open. @param {string} value */
export function setApiKey(value) {
  key = value.trim();
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // As above.
  }
}

/** An error answer of the server; `status` is 0 if there was no answer. */
export class ApiError extends Error {
  constructor(message, status = 0, type = "") {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.type = type;
  }
}

/** The error of an answer `{"error": {"message", "type", "code"}}`, in whatever state it arrives. */
function errorOf(value, status) {
  const error = value?.error ?? value;
  if (typeof error === "string") return new ApiError(error, status);
  const message = typeof error?.message === "string" ? error.message : `The server answered with status ${status}.`;
  return new ApiError(message, Number.isInteger(error?.code) ? error.code : status, String(error?.type ?? ""));
}

/** Headers of requests. */
function withKey(headers = {}) {
  // Bytes above 0xff are no header: fetch would throw a TypeError, which means a lost connection here.
  if (/[^\x20-\x7e]/.test(key)) throw new ApiError("The API key has characters that no key has.", 401);
  return key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
}

async function send(path, options) {
  const headers = withKey(options.headers);
  let answer;
  try {
    answer = await fetch(new URL(path, root), { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (answer.ok) return answer;
  let value = null;
  try {
    value = await answer.json();
  } catch {
    // Not JSON: the status says what there is to say.
  }
  throw errorOf(value, answer.status);
}

/**
 * The JSON at `path`.
 * @param {string} path @param {AbortSignal} [signal]
 * @throws {ApiError}
 */
export async function get(path, signal) {
  const answer = await send(path, { signal });
  try {
    return await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(`${path}: the answer is not JSON.`, answer.status);
  }
}

/**
 * A document of its own for Markdown. It runs and loads nothing. (`fetch` makes no documents.)
 * @param {string} text @returns {Promise<Document>}
 */
export function markdown(text) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", new URL("markdown", root));
    request.responseType = "document";
    for (const [name, value] of Object.entries(withKey({ "Content-Type": "application/json" }))) {
      request.setRequestHeader(name, value);
    }
    const fail = () => reject(new ApiError("The text cannot be formatted.", request.status));
    request.addEventListener("load", () => (request.status === 200 ? resolve(request.response) : fail()));
    request.addEventListener("error", fail);
    request.send(JSON.stringify({ text }));
  });
}

/**
 * The chunks of a chat completion, as they come.
 * @param {object} body @param {AbortSignal} signal
 * @throws {ApiError} also for an error amid the stream, and where it ends before `[DONE]`
 */
export async function* chat(body, signal) {
  // It names its model: that one is loaded, also with --no-models-autoload.
  const answer = await send("v1/chat/completions?autoload=true", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new ApiError("The server sent an event that is not JSON.");
    }
    if (chunk?.error) throw errorOf(chunk, 0);
    yield chunk;
  }
  throw new ApiError("The connection was lost before the answer's end.");
}

/** The data of server-sent events. @param {ReadableStream<Uint8Array>} stream */
export async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The connection was lost before the answer's end.");
      });
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A carriage return at the end may be half of a line break.
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length > 0) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
        // Comments keep the connection alive; other fields mean nothing here.
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
