// One line above everything that says what went wrong or what was done.

const at = (id) => document.getElementById(id);
let run = null;

/** Shows words, with a button where there is something to do. @param {string} text */
export function show(text, action = "", onAction = null) {
  run = onAction;
  at("notice-text").textContent = text;
  at("notice-action").textContent = action;
  at("notice-action").hidden = !action;
  at("notice").hidden = false;
}

export function close() {
  const had = at("notice").contains(document.activeElement);
  at("notice").hidden = true;
  if (had) at("input").focus();
}

export function start() {
  at("notice-close").addEventListener("click", close);
  at("notice-action").addEventListener("click", () => {
    close();
    run?.();
  });
}
