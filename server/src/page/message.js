// One message on the page.

import { ending, figures } from "./answer.js";
import { copyText, element, show } from "./render.js";

/**
 * The element of a message; `update` fills it.
 * @param {import("./answer.js").Message} message
 */
export function article(message) {
  const mine = message.role === "user";
  const made = element("article", { className: `message ${message.role}` });
  const who = mine ? "You" : "Answer";
  made.ariaLabel = who;
  made.append(element("h3", { className: "hidden", textContent: who }));
  if (!mine) {
    const summary = element("summary", {});
    made.append(
      element("details", { className: "reasoning", hidden: true }, summary, element("div", { className: "text" })),
    );
  }
  if (message.images) {
    const images = message.images.map((src) => element("img", { src, alt: "Attached image" }));
    made.append(element("div", { className: "images" }, ...images));
  }
  made.append(element("div", { className: mine ? "text plain" : "text content" }));
  if (!mine) made.append(element("div", { className: "calls" }), element("p", { className: "pending", hidden: true }));
  made.append(element("p", { className: "error", hidden: true }), element("footer", {}));
  return made;
}

/**
 * Shows a message as it is now.
 * @param {HTMLElement} made @param {import("./answer.js").Message} message
 * @param {{status: string} | null} generation null where nothing more comes
 * @param {[string, string, (button: HTMLButtonElement) => void][]} actions words on a button, and further ones for
 *   screen readers
 */
export function update(made, message, generation, actions) {
  const part = (name) => made.querySelector(`:scope > ${name}`);
  const error = part(".error");
  error.hidden = !message.error;
  if (error.textContent !== (message.error ?? "")) error.textContent = message.error ?? "";
  if (message.role === "user") {
    part(".text").textContent = message.content;
  } else {
    made.ariaBusy = generation ? "true" : "false";
    reasoning(part(".reasoning"), message, generation);
    show(part(".content"), message.content);
    calls(part(".calls"), message.tools ?? []);
    const empty = !message.content && !message.tools;
    const pending = part(".pending");
    pending.hidden = !generation || (!empty && !generation.status);
    if (!pending.hidden) pending.textContent = generation.status || (message.reasoning ? "Thinking" : "Waiting");
    made.classList.toggle("writing", generation !== null);
  }
  footer(part("footer"), message, generation, actions);
}

function reasoning(details, message, generation) {
  details.hidden = !message.reasoning;
  if (!message.reasoning) return;
  const words = generation && !message.content ? "Thinking" : "Thoughts";
  const summary = details.querySelector("summary");
  if (summary.textContent !== words) summary.textContent = words;
  show(details.querySelector(".text"), message.reasoning);
}

function calls(into, tools) {
  while (into.children.length > tools.length) into.lastChild.remove();
  tools.forEach((tool, index) => {
    const code = into.children[index]?.querySelector("code") ?? into.appendChild(call()).querySelector("code");
    code.textContent = `${tool.name}(${tool.arguments})`;
  });
}

function call() {
  const caption = element("div", { className: "caption" }, element("span", { textContent: "Tool call" }));
  return element("div", { className: "code" }, caption, element("pre", { tabIndex: 0 }, element("code")));
}

/** Breaks between figures only. @param {string[]} parts */
function line(parts, name = "") {
  const spans = parts.map((textContent) => element("span", { textContent }));
  const className = `figures-line ${name}`.trim();
  return element("span", { className }, ...spans.flatMap((span) => [" · ", span]).slice(1));
}

function footer(into, message, generation, actions) {
  const mine = message.role === "user";
  const lines = mine || generation ? [] : [[ending(message)], figures(message)];
  const copy = ["Copy", mine ? "your message" : "the answer", (button) => copyText(message.content, button)];
  const buttons = generation ? [] : [...(message.content ? [copy] : []), ...actions];
  // The same buttons stay, so that focus does.
  const shown = JSON.stringify([lines, buttons.map(([name]) => name)]);
  if (into.shown === shown) return;
  into.shown = shown;
  into.replaceChildren(
    ...lines.flatMap((parts, at) => (parts[0] ? [line(parts, at === 0 ? "ending" : "")] : [])),
    element(
      "span",
      { className: "actions" },
      ...buttons.map(([name, what, run]) => {
        const button = element("button", { type: "button", className: "quiet small", textContent: name });
        button.ariaLabel = `${name} ${what}`;
        button.addEventListener("click", () => run(button));
        return button;
      }),
    ),
  );
}
