// Collects the chunks of a stream into an answer, and puts its figures in words. Pure.

import { bytes, count, counted, duration, percent, short } from "./format.js";

/**
 * A message of a conversation.
 * @typedef {object} Message
 * @property {"user" | "assistant"} role
 * @property {string} content
 * @property {string[]} [images] as data: URLs
 * @property {string} [reasoning]
 * @property {{name: string, arguments: string}[]} [tools] calls, by index
 * @property {string} [finish] "stop", "length", "tool_calls"; absent where the answer did not end by itself
 * @property {boolean} [stopped] by the user
 * @property {string} [error]
 * @property {object} [timings] llama-server's, with ours
 * @property {object} [usage]
 */

/** @returns {Message} */
export function blank() {
  return { role: "assistant", content: "" };
}

/** Adds a chunk to an answer. @param {Message} message @param {object} chunk */
export function add(message, chunk) {
  if (chunk.timings) message.timings = chunk.timings;
  if (chunk.usage) message.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  if (typeof delta.content === "string") message.content += delta.content;
  if (typeof delta.reasoning_content === "string") {
    message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  }
  for (const call of Array.isArray(delta.tool_calls) ? delta.tool_calls : []) {
    message.tools ??= [];
    // Calls are counted from 0; one that skips would leave holes.
    const index = Math.min(Math.max(0, call.index ?? 0), message.tools.length);
    message.tools[index] ??= { name: "", arguments: "" };
    message.tools[index].name += call.function?.name ?? "";
    message.tools[index].arguments += call.function?.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

/** How far a prompt is, in words; null where the chunk does not say. @param {object} chunk */
export function progress(chunk) {
  const { total, processed, cache, time_ms } = chunk.prompt_progress ?? {};
  if (!(total > 0) || processed >= total) return null;
  const seconds = Math.ceil((time_ms * (total - processed)) / (processed - cache) / 1000);
  const left = Number.isFinite(seconds) ? `, about ${counted(seconds, "second")} left` : "";
  return `Reading the prompt: ${count(processed)} of ${count(total)} tokens${left}`;
}

/** An answer's figures, those that are known. @param {Message} message @returns {string[]} */
export function figures({ timings, usage }) {
  const known = (value) => typeof value === "number" && Number.isFinite(value);
  const t = timings ?? {};
  const words = [];
  const tokens = t.predicted_n ?? usage?.completion_tokens;
  if (known(tokens)) words.push(counted(tokens, "token"));
  if (known(t.predicted_per_second)) words.push(`${short(t.predicted_per_second)} tokens/s`);
  const prompt = known(t.prompt_n) ? t.prompt_n + (t.cache_n ?? 0) : usage?.prompt_tokens;
  if (known(prompt)) {
    const reused = t.cache_n > 0 ? `, ${count(t.cache_n)} reused` : "";
    words.push(`prompt ${count(prompt)}${reused}`);
  }
  if (known(t.prompt_ms)) words.push(`read in ${duration(t.prompt_ms)}`);
  // Where the whole model is in memory, there is nothing to hit.
  if (known(t.hit_rate) && (t.hit_rate > 0 || t.bytes_per_token > 0)) {
    words.push(`${percent(t.hit_rate)} hits`, `${bytes(t.bytes_per_token ?? 0)}/token`);
    if (known(t.io_wait_ms)) words.push(`waited ${duration(t.io_wait_ms)} for the disk`);
  }
  return words;
}

/** Why an answer ended where it did, where that is worth a word. @param {Message} message */
export function ending(message) {
  if (message.stopped) return "Stopped.";
  if (message.finish === "length") return "The answer reached its limit of tokens.";
  if (message.role === "assistant" && !message.finish && !message.error)
    return "Incomplete: the page was left meanwhile.";
  return "";
}

/** The messages of a request. @param {{system: string, messages: Message[]}} conversation @param {number} end */
export function history(conversation, end) {
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  const parts = (content, images) => [
    { type: "text", text: content },
    ...images.map((url) => ({ type: "image_url", image_url: { url } })),
  ];
  return system.concat(
    conversation.messages
      .slice(0, end)
      .map(({ role, content, images }) => ({ role, content: images ? parts(content, images) : content })),
  );
}
