// What screen readers say: an answer while it is written, in whole blocks instead of tokens, and what buttons did.

const live = document.getElementById("spoken");

/** Shorter prompts are read before anyone could say so. */
const LONG_TOKENS = 1000;
/** How long a line stays, in milliseconds: said once, it must not be met again by those who read the page on. */
const STAYS_MS = 10_000;

/** The answer's element. @type {HTMLElement | null} */
let article = null;
let said = 0;
let thinks = false;
/** Quarters of the prompt that were read. */
let quarters = 0;

/** An answer begins. @param {HTMLElement} made its element, whose blocks are read as they are complete */
export function begin(made) {
  article = made;
  said = quarters = 0;
  thinks = false;
  say("Answering.");
}

/** Says how far a long prompt is. @param {{total: number, processed: number} | undefined} progress of a chunk */
export function prompt(progress) {
  const now = Math.floor((4 * progress?.processed) / progress?.total);
  if (!article?.isConnected || !(progress?.total >= LONG_TOKENS) || !(now > quarters) || now >= 4) return;
  quarters = now;
  say(`${25 * now} % of the prompt is read.`);
}

/** Reads what is complete by now; all of it, and the end, when nothing more comes. */
export function go() {
  if (!article?.isConnected) return;
  const content = article.querySelector(":scope > .content");
  const blocks = [...content.children];
  const done = article.ariaBusy !== "true" && content.shown === content.wanted;
  if (!thinks && !done && blocks.length === 0 && !article.querySelector(":scope > .reasoning").hidden) {
    thinks = true;
    say("Thinking.");
  }
  // The last block may still grow.
  for (const block of blocks.slice(said, done ? blocks.length : -1)) say(block.textContent);
  said = Math.max(said, blocks.length - (done ? 0 : 1));
  if (!done) return;
  const error = article.querySelector(":scope > .error").textContent;
  say(error || article.querySelector(".ending")?.textContent || "The answer is complete.");
  article = null;
}

/** @param {string} text */
export function say(text) {
  const line = document.createElement("p");
  line.textContent = text;
  live.append(line);
  setTimeout(() => line.remove(), STAYS_MS);
}
