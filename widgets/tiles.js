// One tile per rank on a canvas: drawn when something about it changed, and no oftener than the screen shows.

import { fitCanvas, h } from "./dom.js";
import { layOut } from "./layout.js";
import { formatBytes, formatRanks } from "./words.js";

/** State -> its shape, beside its colour, in a box of `s` pixels round (x, y). */
const SHAPES = {
  starting(c, x, y, s) {
    c.setLineDash([s / 5, s / 6]);
    c.beginPath();
    c.arc(x, y, s * 0.38, 0, 7);
    c.stroke();
    c.setLineDash([]);
  },
  idle(c, x, y, s) {
    c.beginPath();
    c.arc(x, y, s * 0.36, 0, 7);
    c.stroke();
  },
  busy(c, x, y, s) {
    c.beginPath();
    c.moveTo(x - s * 0.3, y - s * 0.4);
    c.lineTo(x + s * 0.42, y);
    c.lineTo(x - s * 0.3, y + s * 0.4);
    c.fill();
  },
  waiting(c, x, y, s) {
    c.fillRect(x - s * 0.34, y - s * 0.4, s * 0.24, s * 0.8);
    c.fillRect(x + s * 0.1, y - s * 0.4, s * 0.24, s * 0.8);
  },
  silent(c, x, y, s) {
    c.font = `700 ${Math.round(s * 1.15)}px ui-sans-serif, system-ui, sans-serif`;
    c.textAlign = "center";
    c.textBaseline = "middle";
    c.fillText("?", x, y + s * 0.05);
    c.textAlign = "left";
    c.textBaseline = "alphabetic";
  },
  dead(c, x, y, s) {
    c.beginPath();
    for (const way of [-1, 1]) {
      c.moveTo(x - s * 0.34, y - s * 0.34 * way);
      c.lineTo(x + s * 0.34, y + s * 0.34 * way);
    }
    c.stroke();
  },
  ended(c, x, y, s) {
    c.strokeRect(x - s * 0.3, y - s * 0.3, s * 0.6, s * 0.6);
  },
};

const COLOURS = ["text", "muted", "line", "panel", "accent", "ring", "starting", "idle", "busy", "waiting", "silent", "dead"];

export class Tiles {
  /**
   * @param {import("./picture.js").Picture} picture
   * @param {{onselect: (ranks: Set<number>) => void, onopen: () => void}} told
   */
  constructor(picture, told) {
    this.picture = picture;
    this.told = told;
    /** @type {Set<number>} */
    this.selected = new Set();
    this.focused = 0; // index into picture.ranks
    this.anchor = 0;
    this.dirty = new Set();
    this.frame = 0;
    this.spent = []; // milliseconds of the last drawings, for the benchmark
    this.plan = layOut([], [], 400);
    this.width = 0;

    this.canvas = h("canvas", { class: "mbd-canvas", "aria-hidden": "true" });
    this.headers = h("div", { class: "mbd-headers" });
    this.rubber = h("div", { class: "mbd-rubber", hidden: true });
    this.option = h("div", { role: "option", id: `mbd-option-${Math.random().toString(36).slice(2)}`, class: "mbd-unseen" });
    this.box = h("div", {
      class: "mbd-tiles", role: "listbox", tabindex: "0", "aria-multiselectable": "true", "aria-label": "Ranks",
      "aria-activedescendant": this.option.id,
    }, this.option, this.canvas, this.rubber);
    this.tip = h("div", { class: "mbd-tip", hidden: true, role: "presentation" });
    this.element = h("div", { class: "mbd-tilebox" }, this.headers, this.box, this.tip);
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("focus", () => this.mark([this.picture.ranks[this.focused]]));
    this.box.addEventListener("blur", () => this.mark([this.picture.ranks[this.focused]]));
    this.box.addEventListener("pointerdown", (event) => this.press(event));
    this.box.addEventListener("pointermove", (event) => this.hover(event));
    this.box.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.observer = new ResizeObserver(() => {
      const width = Math.floor(this.element.clientWidth);
      if (width && Math.abs(width - this.width) > 1) this.arrange();
    });
    this.observer.observe(this.element);
  }

  close() {
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
  }

  /** Other axes, another width or another theme: everything anew. */
  arrange() {
    this.width = Math.floor(this.element.clientWidth) || 600;
    this.plan = layOut(this.picture.axes, this.picture.ranks, this.width);
    this.index = new Map(this.picture.ranks.map((rank, index) => [rank, index]));
    this.focused = Math.min(this.focused, Math.max(0, this.picture.ranks.length - 1));
    this.context = fitCanvas(this.canvas, this.plan.width, this.plan.height);
    this.box.style.height = `${this.plan.height}px`;
    const style = getComputedStyle(this.element);
    this.colours = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--mbd-${name}`).trim()]));
    this.headers.replaceChildren(
      ...this.plan.headers.map((header) =>
        h("button", {
          type: "button", tabindex: "-1", class: `mbd-header${header.side ? " mbd-side" : header.block ? " mbd-block" : ""}`,
          title: `select ranks ${formatRanks(header.ranks)}`,
          style: `left:${header.x}px;top:${header.y}px;width:${header.width}px;${header.side ? `height:${this.plan.tileHeight}px` : ""}`,
          onclick: (event) => this.select(header.ranks, event.shiftKey || event.ctrlKey || event.metaKey),
        }, header.text),
      ),
    );
    this.describeFocused();
    this.mark(this.picture.ranks);
  }

  /** These look otherwise now. @param {Iterable<number>} ranks */
  mark(ranks) {
    for (const rank of ranks) this.dirty.add(rank);
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    if (!this.context) return;
    const began = performance.now();
    for (const rank of this.dirty) {
      const index = this.index.get(rank);
      if (index !== undefined) this.drawTile(rank, index);
    }
    this.dirty.clear();
    this.spent.push(performance.now() - began);
    if (this.spent.length > 600) this.spent.splice(0, 300);
  }

  drawTile(rank, index) {
    const { context: c, colours, plan, picture } = this;
    const place = plan.places[index];
    if (!place) return;
    const { x, y } = place;
    const w = plan.tileWidth;
    const t = plan.tileHeight;
    const look = picture.look(rank);
    const colour = colours[look] ?? colours.muted;
    const selected = this.selected.has(rank);
    const blamed = picture.blamed.has(rank);
    c.clearRect(x - 1.5, y - 1.5, w + 3, t + 3);
    c.globalAlpha = selected ? 0.22 : look === "idle" ? 0.07 : 0.16;
    c.fillStyle = selected ? colours.accent : colour;
    c.beginPath();
    c.roundRect(x, y, w, t, plan.size === "tiny" ? 2 : 4);
    c.fill();
    c.globalAlpha = 1;
    if (look === "silent" || look === "dead") this.hatch(x, y, w, t, colour);
    c.strokeStyle = blamed ? colours.ring : selected ? colours.accent : colour;
    c.lineWidth = selected ? 3 : blamed ? 2 : 1;
    c.globalAlpha = blamed || selected ? 1 : 0.55;
    const inset = c.lineWidth / 2; // so that the next drawing of the tile clears all of it
    c.beginPath();
    c.roundRect(x + inset, y + inset, w - 2 * inset, t - 2 * inset, plan.size === "tiny" ? 2 : 4);
    c.stroke();
    c.globalAlpha = 1;
    c.fillStyle = c.strokeStyle = colour;
    c.lineWidth = plan.size === "tiny" ? 1.3 : 1.6;
    if (plan.size === "large") this.drawLarge(rank, x, y, w, t, look, colour);
    else if (plan.size === "medium") this.drawMedium(rank, x, y, w, t, look);
    else SHAPES[look](c, x + w / 2, y + (t - 3) / 2, plan.size === "tiny" ? 8 : 12);
    const memory = picture.get("memory", rank);
    if (memory !== undefined) {
      const edge = plan.size === "large" ? 8 : plan.size === "medium" ? 5 : 2;
      const bar = plan.size === "large" ? 4 : plan.size === "medium" ? 3 : 2;
      const top = y + t - bar - (plan.size === "large" ? 6 : plan.size === "medium" ? 4 : 1.5);
      c.fillStyle = colours.line;
      c.fillRect(x + edge, top, w - 2 * edge, bar);
      c.fillStyle = memory > 92 && String(picture.get("device", rank)).startsWith("cuda") ? colours.dead : colours.muted;
      c.fillRect(x + edge, top, ((w - 2 * edge) * Math.min(100, memory)) / 100, bar);
    }
    if (blamed && plan.size === "tiny") this.badge(x + w - 3.5, y + 3.5, 3.5);
    else if (blamed && plan.size !== "large") this.badge(x + w - 4.5, y + 4.5, 6);
    if (index === this.focused && this.box.matches(":focus")) {
      c.strokeStyle = colours.text;
      c.lineWidth = 1.5;
      c.setLineDash([3, 2]);
      c.strokeRect(x + 1.5, y + 1.5, w - 3, t - 3);
      c.setLineDash([]);
    }
  }

  hatch(x, y, w, t, colour) {
    const c = this.context;
    c.save();
    c.clip();
    c.globalAlpha = 0.25;
    c.strokeStyle = colour;
    c.lineWidth = 1;
    c.beginPath();
    for (let at = -t; at < w; at += 6) {
      c.moveTo(x + at, y + t);
      c.lineTo(x + at + t, y);
    }
    c.stroke();
    c.restore();
  }

  badge(x, y, size) {
    const { context: c, colours } = this;
    c.fillStyle = colours.ring;
    c.beginPath();
    c.arc(x, y, size, 0, 7);
    c.fill();
    if (size < 5) return;
    c.fillStyle = "#fff";
    c.font = `700 ${size * 1.7}px ui-sans-serif, system-ui, sans-serif`;
    c.textAlign = "center";
    c.fillText("!", x, y + size * 0.6);
    c.textAlign = "left";
  }

  drawLarge(rank, x, y, w, t, look, colour) {
    const { context: c, colours, picture } = this;
    const font = "ui-sans-serif, system-ui, 'Segoe UI', sans-serif";
    c.fillStyle = colours.text;
    c.font = `650 14px ${font}`;
    c.fillText(String(rank), x + 8, y + 18);
    const after = c.measureText(String(rank)).width;
    c.fillStyle = c.strokeStyle = colour;
    SHAPES[look](c, x + 19 + after, y + 13, 10);
    c.font = `600 11.5px ${font}`;
    c.fillText(look, x + 29 + after, y + 17.5);
    const age = picture.get("age", rank) ?? 0;
    c.font = `11px ${font}`;
    c.textAlign = "right";
    if (picture.blamed.has(rank)) this.badge(x + w - 13, y + 13, 7);
    else if (age >= 2) {
      c.fillStyle = colours.silent;
      c.fillText(`${age} s`, x + w - 8, y + 17.5);
    }
    c.textAlign = "left";
    c.fillStyle = colours.text;
    c.font = "11.5px ui-monospace, Menlo, Consolas, monospace";
    const cell = picture.get("cell", rank);
    const line = picture.get("line", rank);
    const where = cell ? (line ? `${cell}, line ${line}` : cell) : picture.get("exit", rank) ?? "";
    this.text(where, x + 8, y + 35, w - 16);
    c.fillStyle = look === "waiting" ? colour : colours.muted;
    this.text(picture.get("doing", rank) || "", x + 8, y + 50, w - 16);
    c.fillStyle = colours.muted;
    c.font = `11px ${font}`;
    const bytes = picture.get("bytes", rank);
    if (bytes !== undefined) c.fillText(formatBytes(bytes), x + 8, y + t - 15);
    const device = picture.get("device", rank);
    if (device) {
      c.textAlign = "right";
      c.fillText(device, x + w - 8, y + t - 15);
      c.textAlign = "left";
    }
  }

  drawMedium(rank, x, y, w, t, look) {
    const { context: c, colours, picture } = this;
    SHAPES[look](c, x + 12, y + 12, 10);
    c.fillStyle = colours.text;
    c.font = "600 12px ui-sans-serif, system-ui, sans-serif";
    c.fillText(String(rank), x + 21, y + 16);
    c.font = "10.5px ui-monospace, Menlo, Consolas, monospace";
    const line = picture.get("line", rank);
    const age = picture.get("age", rank) ?? 0;
    c.fillStyle = colours.muted;
    let doing = picture.get("doing", rank) ?? "";
    // The number tells collectives of one name apart, where there is no room for both.
    if (c.measureText(doing).width > w - 12) doing = doing.slice(Math.max(0, doing.lastIndexOf("#")));
    this.text(age >= 3 ? `beat ${age} s` : doing || (line ? `line ${line}` : ""), x + 6, y + 31, w - 12);
  }

  text(text, x, y, width) {
    const c = this.context;
    const most = Math.floor(width / 6.6);
    let shown = text.length > most + 4 ? text.slice(0, most + 4) : text;
    while (shown.length > 1 && c.measureText(shown).width > width) shown = `${shown.slice(0, -2)}…`;
    c.fillText(shown, x, y);
  }

  // ---- choosing

  select(ranks, add = false) {
    const before = this.selected;
    this.selected = new Set(add ? [...before, ...ranks] : ranks);
    this.mark([...before, ...this.selected]);
    this.describeFocused();
    this.told.onselect(this.selected);
  }

  focus(index) {
    const before = this.focused;
    this.focused = Math.max(0, Math.min(this.picture.ranks.length - 1, index));
    this.mark([this.picture.ranks[before], this.picture.ranks[this.focused]]);
    this.describeFocused();
  }

  describeFocused() {
    const rank = this.picture.ranks[this.focused];
    if (rank === undefined) return;
    this.option.textContent = this.picture.describe(rank);
    this.option.setAttribute("aria-selected", String(this.selected.has(rank)));
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  hit({ x, y }) {
    const { places, tileWidth, tileHeight } = this.plan;
    return places.findIndex((place) => x >= place.x && x <= place.x + tileWidth && y >= place.y && y <= place.y + tileHeight);
  }

  press(event) {
    if (event.button !== 0) return;
    const from = this.at(event);
    const index = this.hit(from);
    const more = event.ctrlKey || event.metaKey;
    this.box.focus({ preventScroll: true });
    if (index >= 0) {
      const rank = this.picture.ranks[index];
      if (event.shiftKey) this.selectRange(index, more);
      else {
        this.anchor = index;
        if (more && this.selected.has(rank)) this.select([...this.selected].filter((other) => other !== rank));
        else if (!more && this.selected.size === 1 && this.selected.has(rank)) this.select([]);
        else this.select([rank], more);
      }
      this.focus(index);
    } else if (!more && !event.shiftKey) this.select([]);
    const kept = more || event.shiftKey ? [...this.selected] : [];
    const move = (moved) => {
      const to = this.at(moved);
      if (this.rubber.hidden && Math.hypot(to.x - from.x, to.y - from.y) < 6) return;
      const [left, right] = [Math.min(from.x, to.x), Math.max(from.x, to.x)];
      const [top, bottom] = [Math.min(from.y, to.y), Math.max(from.y, to.y)];
      this.rubber.hidden = false;
      this.rubber.style.cssText = `left:${left}px;top:${top}px;width:${right - left}px;height:${bottom - top}px`;
      const { places, tileWidth, tileHeight } = this.plan;
      const inside = this.picture.ranks.filter((_, at) => {
        const place = places[at];
        return place.x < right && place.x + tileWidth > left && place.y < bottom && place.y + tileHeight > top;
      });
      this.select([...kept, ...inside]);
    };
    const up = () => {
      this.rubber.hidden = true;
      this.box.removeEventListener("pointermove", move);
      this.box.removeEventListener("pointerup", up);
      this.box.removeEventListener("pointercancel", up);
    };
    this.box.setPointerCapture?.(event.pointerId);
    this.box.addEventListener("pointermove", move);
    this.box.addEventListener("pointerup", up);
    this.box.addEventListener("pointercancel", up);
  }

  selectRange(index, add) {
    const [low, high] = [Math.min(this.anchor, index), Math.max(this.anchor, index)];
    this.select(this.picture.ranks.slice(low, high + 1), add);
  }

  /** The tile above or below. */
  neighbour(index, way) {
    const { places } = this.plan;
    const wanted = places[index]?.row + way;
    let best = index;
    let distance = Infinity;
    places.forEach((place, other) => {
      if (place.row !== wanted) return;
      const apart = Math.abs(place.x - places[index].x);
      if (apart < distance) [best, distance] = [other, apart];
    });
    return best;
  }

  key(event) {
    const moves = {
      ArrowLeft: () => this.focused - 1,
      ArrowRight: () => this.focused + 1,
      ArrowUp: () => this.neighbour(this.focused, -1),
      ArrowDown: () => this.neighbour(this.focused, 1),
      Home: () => 0,
      End: () => this.picture.ranks.length - 1,
    };
    const rank = this.picture.ranks[this.focused];
    if (event.key in moves) {
      this.focus(moves[event.key]());
      if (event.shiftKey) this.selectRange(this.focused, false);
      else this.anchor = this.focused;
      this.reveal(this.plan.places[this.focused]);
    } else if (event.key === " ") {
      this.anchor = this.focused;
      if (event.shiftKey) this.selectRange(this.focused, true);
      else if (this.selected.has(rank)) this.select([...this.selected].filter((other) => other !== rank));
      else this.select([rank], true);
    } else if (event.key === "a" && (event.ctrlKey || event.metaKey)) this.select(this.picture.ranks);
    else if (event.key === "Escape") this.select([]);
    else if (event.key === "Enter") {
      if (!this.selected.size) this.select([rank]);
      this.told.onopen();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Scroll so far that a tile is seen. */
  reveal({ y }) {
    const view = this.element.parentElement;
    const bottom = y + this.plan.tileHeight + 4;
    if (y - 22 < view.scrollTop) view.scrollTop = y - 22;
    else if (bottom > view.scrollTop + view.clientHeight) view.scrollTop = bottom - view.clientHeight;
  }

  hover(event) {
    if (event.buttons || this.plan.size === "large") {
      this.tip.hidden = true;
      return;
    }
    const index = this.hit(this.at(event));
    this.tip.hidden = index < 0;
    if (index < 0) return;
    this.tip.textContent = this.picture.describe(this.picture.ranks[index]);
    const place = this.plan.places[index];
    const below = place.y + this.plan.tileHeight + 4;
    this.tip.style.top = `${below}px`;
    this.tip.style.left = `${Math.min(place.x, Math.max(0, this.width - 300))}px`;
  }
}
