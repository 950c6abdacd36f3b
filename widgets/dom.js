// Elements of the page. What ranks say arrives here as text and stays text: nothing is ever parsed as markup.

/**
 * @param {string} tag
 * @param {Record<string, any>} [properties] `class`, `on…` handlers, `dataset`, attributes
 * @param {...(Node | string | null | undefined | false)} children
 * @returns {any} the element
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** @param {string} text @param {(event: Event) => void} onclick @param {Record<string, any>} [properties] */
export function button(text, onclick, properties = {}) {
  return h("button", { type: "button", class: "mbd-button", onclick, ...properties }, text);
}

/** Put text on the clipboard, also where the page may not use the clipboard's own interface. @param {string} text */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { style: "position:fixed;opacity:0" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** A drawing surface as sharp as the screen. @returns {CanvasRenderingContext2D} */
export function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/**
 * Whether the page behind an element is dark: what is measured there counts, not what a front end calls its theme, for
 * JupyterLab, VS Code, marimo and a plain page all say it in ways of their own.
 * @param {Element} element
 */
export function isDark(element) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  for (let at = element; at; at = at.parentElement ?? at.getRootNode().host) {
    const colour = getComputedStyle(at).backgroundColor;
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = context.getImageData(0, 0, 1, 1).data;
    if (alpha > 127) return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 128;
  }
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}
