// Small charts of numbers over time or steps: the middle and the range of all ranks, and a line for each rank followed.

import { fitCanvas, h } from "./dom.js";
import { formatBytes, formatNumber, formatSeconds } from "./words.js";

const LINES = ["#0b6bcb", "#c2410c", "#0f7a3d", "#9333ea", "#b4234d", "#0e7490", "#8a6100", "#64748b"];
const LINES_DARK = ["#5aa9ff", "#ff9357", "#4cc38a", "#c58cff", "#ff7a9c", "#4fd1e5", "#e3b341", "#9fb0c3"];
const HEIGHT = 150;

export class Charts {
  /** @param {(name: string) => boolean} wanted which charts this panel shows @param {string} empty said where none is */
  constructor(wanted, empty) {
    this.wanted = wanted;
    this.empty = empty;
    this.element = h("div", { class: "mbd-charts" });
    /** @type {Map<string, {figure: any, canvas: any, caption: any, chart: any}>} */
    this.shown = new Map();
  }

  /** @param {Map<string, any>} charts @param {boolean} dark */
  show(charts, dark) {
    this.dark = dark;
    const names = [...charts.keys()].filter(this.wanted);
    for (const [name, known] of this.shown) {
      if (!names.includes(name)) {
        known.figure.remove();
        this.shown.delete(name);
      }
    }
    this.note ??= h("p", { class: "mbd-empty" }, this.empty);
    if (!names.length) this.element.append(this.note);
    else this.note.remove();
    for (const name of names) {
      if (!this.shown.has(name)) {
        const canvas = h("canvas", { role: "img" });
        const caption = h("figcaption", {});
        const figure = h("figure", {}, caption, canvas);
        canvas.addEventListener("pointermove", (event) => this.point(name, event.offsetX));
        canvas.addEventListener("pointerleave", () => this.point(name, null));
        this.shown.set(name, { figure, canvas, caption, chart: null });
        this.element.append(figure);
      }
      const known = this.shown.get(name);
      known.chart = charts.get(name);
      this.draw(name, null);
    }
  }

  point(name, x) {
    this.draw(name, x);
  }

  draw(name, pointed) {
    const { canvas, caption, chart, figure } = this.shown.get(name);
    const width = Math.max(180, figure.clientWidth - 2);
    const c = fitCanvas(canvas, width, HEIGHT);
    const style = getComputedStyle(this.element);
    const colour = (which) => style.getPropertyValue(`--mbd-${which}`).trim();
    const palette = this.dark ? LINES_DARK : LINES;
    const format = chart.unit === "bytes" ? formatBytes : formatNumber;
    const lines = Object.entries(chart.lines).filter(([, points]) => points.length);
    const band = chart.band;
    const values = [...band.flatMap(([, low, , high]) => [low, high]), ...lines.flatMap(([, points]) => points.map(([, y]) => y))].filter(Number.isFinite);
    const along = [...band.map(([x]) => x), ...lines.flatMap(([, points]) => points.map(([x]) => x))];
    caption.replaceChildren(h("b", {}, chart.title), " ");
    if (!values.length) return;
    let [low, high] = [Math.min(...values), Math.max(...values)];
    if (name.startsWith(".")) [low, high] = [0, high || 1];
    else if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
    const [first, last] = [Math.min(...along), Math.max(...along)];
    const box = { left: 58, right: width - 8, top: 8, bottom: HEIGHT - 20 };
    const X = (x) => box.left + ((x - first) / (last - first || 1)) * (box.right - box.left);
    const Y = (y) => box.bottom - ((y - low) / (high - low || 1)) * (box.bottom - box.top);
    c.font = "11px ui-sans-serif, system-ui, sans-serif";
    c.fillStyle = colour("muted");
    c.strokeStyle = colour("line");
    c.lineWidth = 1;
    c.textAlign = "right";
    const step = roundStep((high - low) / 4, chart.unit === "bytes");
    for (let tick = Math.ceil(low / step); tick * step <= high; tick++) {
      const value = tick * step;
      const y = Math.round(Y(value)) + 0.5;
      c.beginPath();
      c.moveTo(box.left, y);
      c.lineTo(box.right, y);
      c.stroke();
      c.fillText(format(value), box.left - 6, y + 4);
    }
    const label = (x) => (chart.x === "step" ? `step ${x}` : x >= last ? "now" : `${formatSeconds(last - x)} ago`);
    c.textAlign = "left";
    c.fillText(label(first), box.left, HEIGHT - 5);
    c.textAlign = "right";
    c.fillText(label(last), box.right, HEIGHT - 5);
    if (band.length) {
      c.fillStyle = colour("busy");
      c.globalAlpha = 0.18;
      c.beginPath();
      band.forEach(([x, , , top]) => c.lineTo(X(x), Y(top)));
      [...band].reverse().forEach(([x, bottom]) => c.lineTo(X(x), Y(bottom)));
      c.fill();
      c.globalAlpha = 1;
    }
    const drawn = lines.length ? lines : [["middle", band.map(([x, , middle]) => [x, middle])]];
    drawn.forEach(([rank, points], index) => {
      c.strokeStyle = rank === "middle" ? colour("busy") : palette[index % palette.length];
      c.lineWidth = 1.6;
      c.setLineDash(index >= palette.length ? [4, 3] : []);
      c.beginPath();
      for (const [x, y] of points) if (Number.isFinite(y)) c.lineTo(X(x), Y(y));
      c.stroke();
      if (points.length === 1) c.strokeRect(X(points[0][0]) - 1, Y(points[0][1]) - 1, 2, 2);
      c.setLineDash([]);
    });
    let at = null;
    if (pointed !== null && pointed >= box.left && pointed <= box.right) {
      at = first + ((pointed - box.left) / (box.right - box.left)) * (last - first);
      c.strokeStyle = colour("muted");
      c.lineWidth = 1;
      c.beginPath();
      c.moveTo(pointed, box.top);
      c.lineTo(pointed, box.bottom);
      c.stroke();
    }
    const near = (points) => points.reduce((best, point) => (Math.abs(point[0] - (at ?? last)) <= Math.abs(best[0] - (at ?? last)) ? point : best));
    const words = drawn.slice(0, 8).map(([rank, points], index) => {
      const [, y] = near(points);
      const shade = rank === "middle" ? colour("busy") : palette[index % palette.length];
      return h("span", { class: "mbd-key" }, h("i", { style: `background:${shade}` }), `${rank === "middle" ? "median" : `rank ${rank}`}: ${format(y)}`);
    });
    if (band.length && !lines.length) {
      const [, lowest, , highest] = near(band);
      words.push(h("span", { class: "mbd-key" }, `range: ${format(lowest)} to ${format(highest)}`));
    }
    if (at !== null) words.push(h("span", { class: "mbd-key" }, label(chart.x === "step" ? Math.round(at) : at)));
    caption.append(...words);
    canvas.setAttribute("aria-label", `${chart.title}: from ${format(Math.min(...values))} to ${format(Math.max(...values))}, ${drawn.length} lines`);
  }
}

/** The next round number: 1, 2 or 5 with zeros; of bytes a power of two. @param {number} least @param {boolean} bytes */
function roundStep(least, bytes) {
  if (bytes) return 2 ** Math.ceil(Math.log2(least));
  const unit = 10 ** Math.floor(Math.log10(least));
  return unit * [1, 2, 5, 10].find((many) => many * unit >= least);
}
