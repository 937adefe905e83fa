// Files for the next message: text goes into it, images beside it.

import * as notice from "./notice.js";
import { element } from "./render.js";

/** The longest text file, and the longer side of an image as it is kept: browsers keep about 5 MB per site. */
const TEXT_BYTES = 1 << 20;
const IMAGE_SIDE = 1024;

const at = (id) => document.getElementById(id);

/** @type {{name: string, text?: string, image?: string}[]} */
let files = [];
let images = false;

export function start() {
  at("attach").addEventListener("click", () => at("attach-files").click());
  at("attach-files").addEventListener("change", async () => {
    const chosen = [...at("attach-files").files];
    at("attach-files").value = "";
    for (const file of chosen) {
      try {
        files.push(await read(file));
      } catch (error) {
        notice.show(`${file.name}: ${error.message}`);
      }
    }
    draw();
  });
}

/** Whether the model takes images. @param {boolean} taken */
export function takeImages(taken) {
  images = taken;
  at("attach").title = images ? "Attach text files and images" : "Attach text files";
}

async function read(file) {
  const { name } = file;
  if (file.type.startsWith("image/")) {
    if (!images) throw new Error("this model takes no images (start the server with --mmproj).");
    return { name, image: await scaled(file) };
  }
  if (file.size > TEXT_BYTES) throw new Error("text files may have 1 MiB.");
  try {
    return { name, text: new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()) };
  } catch {
    throw new Error("this is no text in UTF-8.");
  }
}

async function scaled(file) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error("this image cannot be read.");
  });
  const scale = Math.min(1, IMAGE_SIDE / Math.max(bitmap.width, bitmap.height));
  const size = (side) => Math.max(1, Math.round(side * scale));
  const canvas = element("canvas", { width: size(bitmap.width), height: size(bitmap.height) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function draw() {
  at("attached").replaceChildren(
    ...files.map((file) => {
      const remove = element("button", { type: "button", className: "quiet small", textContent: "Remove" });
      remove.ariaLabel = `Remove ${file.name}`;
      remove.addEventListener("click", () => {
        files = files.filter((other) => other !== file);
        draw();
        at("input").focus();
      });
      return element("li", {}, file.name, remove);
    }),
  );
}

/** Whether something is attached. */
export function any() {
  return files.length > 0;
}

/** A message of these words and what is attached, which it takes. @param {string} words */
export function message(words) {
  const texts = files.filter(({ text }) => text !== undefined);
  const parts = texts.map(({ name, text }) => {
    // Longer than any fence within.
    const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  const found = files.flatMap(({ image }) => image ?? []);
  files = [];
  draw();
  const content = [words, ...parts].filter(Boolean).join("\n\n");
  return { role: "user", content, ...(found.length > 0 ? { images: found } : {}) };
}
