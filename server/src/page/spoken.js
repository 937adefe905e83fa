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
  const lines = blocks.slice(said, done ? blocks.length : -1).map(words);
  said = Math.max(said, blocks.length - (done ? 0 : 1));
  if (done) {
    const error = article.querySelector(":scope > .error").textContent;
    lines.push(error || article.querySelector(".ending")?.textContent || "The answer is complete.");
    article = null;
  }
  // In one piece: Orca said lines that were added together in any order.
  if (lines.length > 0) say(lines.join("\n"));
}

/** A block's text without its buttons. @param {HTMLElement} block */
function words(block) {
  const copy = block.cloneNode(true);
  for (const caption of copy.querySelectorAll(".caption")) {
    const language = caption.firstChild.textContent;
    caption.replaceWith(language ? `Code in ${language}:\n` : "Code:\n");
  }
  for (const cell of copy.querySelectorAll(":is(td, th):not(:last-child)")) cell.append(", ");
  return copy.textContent.trim();
}

/** @param {string} text */
export function say(text) {
  const line = document.createElement("p");
  line.textContent = text;
  live.append(line);
  setTimeout(() => line.remove(), STAYS_MS);
}
