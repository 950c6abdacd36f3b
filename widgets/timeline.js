// The last collectives of each rank on one line of time, and who waits for whom.

import { fitCanvas, h } from "./dom.js";
import { formatSeconds, nameRanks } from "./words.js";

const ROW = 16;
const LEFT = 62;

export class Timeline {
  constructor() {
    this.waits = h("ul", { class: "mbd-waits" });
    this.canvas = h("canvas", { role: "img", "aria-label": "collectives of each rank over the last seconds" });
    this.about = h("p", { class: "mbd-about", "aria-live": "off" }, " ");
    this.empty = h("p", { class: "mbd-empty" }, "No collective has been seen yet.");
    this.element = h("div", { class: "mbd-timeline" }, this.waits, this.empty, this.about, this.canvas);
    this.bars = [];
    this.canvas.addEventListener("pointermove", (event) => {
      const bar = this.bars.find(
        (one) => event.offsetX >= one.x - 1 && event.offsetX <= one.x + one.width + 1 && event.offsetY >= one.y && event.offsetY <= one.y + ROW,
      );
      this.about.textContent = bar ? bar.words : " ";
    });
  }

  /** @param {any} message @param {boolean} dark */
  show(message, dark) {
    this.message = message;
    this.empty.hidden = message.rows.length > 0;
    this.waits.replaceChildren(
      ...message.waits.map((wait) =>
        h("li", {},
          h("b", {}, `${wait.op} #${wait.seq}`), ` (${wait.group}): `,
          wait.inside && `${nameRanks(wait.inside)} waiting for ${formatSeconds(wait.since_s)}`,
          wait.missing && h("span", { class: "mbd-missing" }, ` for ${nameRanks(wait.missing)}`),
        ),
      ),
    );
    this.draw();
  }

  draw() {
    const { rows, window_s: span } = this.message;
    const width = Math.max(240, this.element.clientWidth - 4);
    const c = fitCanvas(this.canvas, width, rows.length * ROW + 22);
    const style = getComputedStyle(this.element);
    const colour = (which) => style.getPropertyValue(`--mbd-${which}`).trim();
    const X = (ago) => LEFT + (1 - Math.min(ago, span) / span) * (width - LEFT - 8);
    this.bars = [];
    c.font = "11px ui-sans-serif, system-ui, sans-serif";
    if (!rows.length) return;
    for (let tick = 0; tick <= 3; tick++) {
      const ago = (span * tick) / 3;
      c.strokeStyle = colour("line");
      c.beginPath();
      c.moveTo(X(ago), 0);
      c.lineTo(X(ago), rows.length * ROW);
      c.stroke();
      c.fillStyle = colour("muted");
      c.textAlign = tick === 0 ? "right" : tick === 3 ? "left" : "center";
      c.fillText(tick === 0 ? "now" : `${formatSeconds(ago)} ago`, X(ago), rows.length * ROW + 16);
    }
    rows.forEach(([rank, bars], row) => {
      const y = row * ROW;
      c.textAlign = "right";
      c.fillStyle = colour("muted");
      c.fillText(`rank ${rank}`, LEFT - 8, y + 12);
      for (const [op, group, seq, began, ended, what, failure] of bars) {
        const x = X(began);
        const long = Math.max(2, X(ended ?? 0) - x);
        c.fillStyle = colour(ended === null ? "waiting" : failure ? "dead" : "busy");
        c.globalAlpha = ended === null ? 0.9 : 0.55;
        c.fillRect(x, y + 1, long, ROW - 2);
        c.globalAlpha = 1;
        const words = `rank ${rank}: ${op} #${seq} (${group})${what ? ` ${what}` : ""}, ${
          ended === null ? `open for ${formatSeconds(began)}` : `took ${formatSeconds(began - ended)}, ended ${formatSeconds(ended)} ago`}${
          failure ? `, not completed: ${failure}` : ""}`;
        this.bars.push({ x, y, width: long, words });
        const label = `${op} #${seq}`;
        if (long > label.length * 6.4 + 8) {
          c.fillStyle = colour("on");
          c.textAlign = "left";
          c.fillText(label, x + 4, y + 11);
        }
      }
    });
  }
}
