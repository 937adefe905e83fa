// A model's text on the page. The server makes HTML of its Markdown, and this page trusts none of it: it copies the
// elements and attributes below into new ones, and everything else becomes text. No string becomes HTML here.

import * as api from "./api.js";
import { say } from "./spoken.js";

const HTML = new Set(
  "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr input li ol p pre span strong table tbody td th thead tr ul".split(
    " ",
  ),
);
const MATHML = new Set(
  (
    "math merror mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms mspace msqrt mstyle " +
    "msub msubsup msup mtable mtd mtext mtr munder munderover none semantics"
  ).split(" "),
);
const ATTRIBUTES = {
  HTML: new Set(["checked", "class", "start"]),
  MathML: new Set(
    (
      "accent accentunder columnspan depth display displaystyle fence form height largeop linethickness lspace " +
      "mathvariant maxsize minsize movablelimits rspace rowspan scriptlevel separator stretchy symmetric voffset width"
    ).split(" "),
  ),
};
/** Styles of tables and formulas. */
const STYLES = /(text-align|justify-items|padding-\w+|border-\w+|margin-left|width|color): ?([^;]+)/g;
/** Deeper elements become text: no one can read them, and browsers draw them slowly. */
const DEPTH = 60;

/** An element with properties and children. @param {string} tag */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** New nodes for the children of an element of another document. @param {Node} from @returns {Node[]} */
export function copied(from, depth = 0) {
  return [...from.childNodes].map((node) => {
    if (node.nodeType === Node.TEXT_NODE) return new Text(node.data);
    if (node.nodeType !== Node.ELEMENT_NODE) return new Text();
    const name = node.localName;
    const kind = node.namespaceURI.endsWith("/MathML") ? "MathML" : "HTML";
    if (depth > DEPTH || !(kind === "MathML" ? MATHML : HTML).has(name)) return new Text(node.textContent);
    if (name === "pre") return code(node);
    const made = document.createElementNS(node.namespaceURI, name);
    for (const { name, value } of node.attributes) if (ATTRIBUTES[kind].has(name)) made.setAttribute(name, value);
    made.append(...copied(node, depth + 1));
    // Below the page's own headings: a title, "Messages", and who speaks.
    if (/^h[1-6]$/.test(name)) made.ariaLevel = String(3 + Number(name[1]));
    for (const [, name, value] of (node.getAttribute("data-style") ?? "").matchAll(STYLES)) {
      made.style.setProperty(name, value);
    }
    if (name === "a") return link(made, node.getAttribute("href") ?? "");
    if (name === "input") Object.assign(made, { type: "checkbox", disabled: true });
    if (name === "table") return framed(element("div", { className: "table" }, made), "Table");
    return made;
  });
}

/** Links show where they lead, and lead to web pages and mail only. */
function link(made, href) {
  const words = made.textContent;
  if (!/^(https?|mailto):/i.test(href)) {
    return element("span", {}, ...made.childNodes, href === words ? "" : ` (${href})`);
  }
  Object.assign(made, { href, rel: "noopener noreferrer", target: "_blank" });
  if (href !== words && href !== `mailto:${words}`) made.append(element("small", { textContent: ` (${href})` }));
  return made;
}

function code(node) {
  const text = node.textContent;
  const language = /^language-(\S+)/.exec(node.querySelector("code")?.className ?? "")?.[1] ?? "";
  const copy = element("button", { type: "button", className: "quiet", textContent: "Copy" });
  copy.ariaLabel = "Copy the code";
  copy.addEventListener("click", () => copyText(text, copy));
  const caption = element("div", { className: "caption" }, element("span", { textContent: language }), copy);
  return element("div", { className: "code" }, caption, framed(element("pre", {}, ...copied(node)), "Code"));
}

/** Keys reach what may scroll, so it has a name. */
function framed(made, name) {
  return Object.assign(made, { tabIndex: 0, role: "group", ariaLabel: name });
}

/** A text as it is. */
function plain(text) {
  return [element("p", { className: "plain", textContent: text })];
}

/** Replaces what differs: what the user reads, selects or has focused stays. */
function replace(into, nodes) {
  let same = 0;
  while (same < nodes.length && into.childNodes[same]?.isEqualNode(nodes[same])) same += 1;
  while (into.childNodes.length > same) into.lastChild.remove();
  into.append(...nodes.slice(same));
}

/**
 * Makes `into` show Markdown; as plain text until the server has answered, and where it does not answer.
 * @param {HTMLElement} into @param {string} text
 */
export async function show(into, text) {
  if ((into.wanted ?? "") === text) return;
  into.wanted = text;
  if (!into.firstChild) replace(into, plain(text));
  if (into.formatting) return;
  into.formatting = true;
  while (into.shown !== into.wanted) {
    const now = into.wanted;
    const began = performance.now();
    let nodes = [];
    try {
      // Between blocks there are only line breaks.
      nodes = copied((await api.markdown(now)).body).filter((node) => !(node instanceof Text && !node.data.trim()));
    } catch {
      nodes = plain(now);
    }
    replace(into, nodes);
    into.shown = now;
    into.dispatchEvent(new Event("shown", { bubbles: true }));
    // A text that grows takes at most a tenth of the server's time.
    const took = performance.now() - began;
    await new Promise((wake) => setTimeout(wake, 9 * took));
  }
  into.formatting = false;
}

/** Copies; the button says whether it worked. @param {string} text @param {HTMLButtonElement} button */
export async function copyText(text, button) {
  const before = button.dataset.words ?? button.textContent;
  button.dataset.words = before;
  let worked = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Over plain HTTP from another machine there is no clipboard.
    const field = element("textarea", { value: text, className: "hidden" });
    document.body.append(field);
    field.select();
    worked = document.execCommand("copy");
    field.remove();
    button.focus();
  }
  button.textContent = worked ? "Copied" : "Not copied";
  say(button.textContent);
  setTimeout(() => (button.textContent = before), 1500);
}
