// An answer for screen readers while it is written: whole blocks, not every token.

const live = document.getElementById("spoken");

/** The answer's element. @type {HTMLElement | null} */
let article = null;
let said = 0;

/** An answer begins. @param {HTMLElement} made its element, whose blocks are read as they are complete */
export function begin(made) {
  article = made;
  said = 0;
  live.replaceChildren();
  say("Answering.");
}

/** Reads what is complete by now; all of it, and the end, when nothing more comes. */
export function go() {
  if (!article?.isConnected) return;
  const content = article.querySelector(":scope > .content");
  const blocks = [...content.children];
  const done = article.ariaBusy !== "true" && content.shown === content.wanted;
  // The last block may still grow.
  for (const block of blocks.slice(said, done ? blocks.length : -1)) say(block.textContent);
  said = Math.max(said, blocks.length - (done ? 0 : 1));
  if (!done) return;
  const error = article.querySelector(":scope > .error").textContent;
  const figures = [...article.querySelectorAll(".figures-line")].map(({ textContent }) => textContent);
  say(error || figures.join(" ") || "Done.");
  article = null;
}

function say(text) {
  const line = document.createElement("p");
  line.textContent = text;
  live.append(line);
}
