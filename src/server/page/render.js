// A model's text on the page. Every character of it ends in a text node: nothing here makes HTML of a string.

/** An element with properties and children. @param {string} tag */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/**
 * Text in blocks: paragraphs, headings, and code between fences. A block begins where the line before it ends, so that
 * text added later changes only the last one.
 * @param {string} text
 * @returns {{kind: "text" | "heading" | "code", text: string, language: string}[]}
 */
export function blocks(text) {
  const found = [];
  let fence = null;
  let open = null;
  const close = () => {
    if (open && (open.kind === "code" || open.lines.length > 0)) {
      found.push({ kind: open.kind, text: open.lines.join("\n"), language: open.language ?? "" });
    }
    open = null;
  };
  for (const line of text.split("\n")) {
    if (fence) {
      const end = line.trim();
      if (end.length >= fence.length && end === fence[0].repeat(end.length)) {
        fence = null;
        close();
      } else {
        open.lines.push(line);
      }
      continue;
    }
    const begins = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/.exec(line);
    const heading = /^#{1,6}\s+(.*)$/.exec(line);
    if (begins) {
      close();
      fence = begins[1];
      open = { kind: "code", lines: [], language: begins[2].trim() };
    } else if (heading) {
      close();
      found.push({ kind: "heading", text: heading[1], language: "" });
    } else if (line.trim() === "") {
      close();
    } else {
      open ??= { kind: "text", lines: [] };
      open.lines.push(line);
    }
  }
  close();
  return found;
}

/** Words with `code` and **strong** parts. @param {string} text @returns {(string | HTMLElement)[]} */
export function inline(text) {
  const parts = [];
  let from = 0;
  for (const match of text.matchAll(/`([^`\n]+)`|\*\*([^*\n]+)\*\*/g)) {
    parts.push(text.slice(from, match.index));
    const [tag, words] = match[1] === undefined ? ["strong", match[2]] : ["code", match[1]];
    parts.push(element(tag, { textContent: words }));
    from = match.index + match[0].length;
  }
  parts.push(text.slice(from));
  return parts.filter((part) => part !== "");
}

function draw(block) {
  switch (block.kind) {
    case "code": {
      const copy = element("button", { type: "button", className: "quiet", textContent: "Copy" });
      copy.addEventListener("click", () => copyText(block.text, copy));
      const caption = element("div", { className: "caption" }, element("span", { textContent: block.language }), copy);
      const code = element("code", { textContent: block.text });
      return element("div", { className: "code" }, caption, element("pre", { tabIndex: 0 }, code));
    }
    case "heading":
      return element("p", { className: "heading" }, ...inline(block.text));
    default:
      return element("p", {}, ...inline(block.text));
  }
}

/** Makes `into` show `text`; blocks that it shows already stay as they are. @param {HTMLElement} into */
export function show(into, text) {
  const wanted = blocks(text);
  const shown = (into.shownBlocks ??= []);
  const same = (a, b) => a && b && a.kind === b.kind && a.text === b.text && a.language === b.language;
  let first = 0;
  while (first < wanted.length && same(wanted[first], shown[first])) first += 1;
  while (into.childNodes.length > first) into.lastChild.remove();
  into.append(...wanted.slice(first).map(draw));
  into.shownBlocks = wanted;
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
  setTimeout(() => (button.textContent = before), 1500);
}
