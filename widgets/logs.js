// What ranks printed, searchable. A line may be a megabyte long and hold anything: it is cut for the eye and stays text.

import { button, copyText, h } from "./dom.js";

const LONGEST = 2000; // characters of a line that are shown
const MOST = 1500; // lines that are shown, the last ones
const LOST_MS = 10000; // an answer that has not come by then is not waited for any more

export class Logs {
  /** @param {(rank: number) => void} ask for a rank's last output */
  constructor(ask) {
    this.ask = ask;
    this.text = "";
    this.rank = 0;
    this.waits = false;
    this.choice = h("input", { type: "number", min: "0", value: "0", class: "mbd-input", "aria-label": "rank",
      onchange: () => this.open(Number(this.choice.value)) });
    this.search = h("input", { type: "search", placeholder: "search", class: "mbd-input", "aria-label": "search in the log",
      oninput: () => {
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.fill(), 120);
      } });
    this.count = h("span", { class: "mbd-muted", role: "status" });
    this.lines = h("div", { class: "mbd-log", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "output" });
    this.element = h("div", { class: "mbd-logs" },
      h("div", { class: "mbd-toolbar" },
        h("label", {}, "rank ", this.choice), this.search, button("Read again", () => this.open(this.rank)),
        button("Copy as text", () => copyText(this.text)), this.count),
      this.lines);
  }

  open(rank) {
    this.rank = rank;
    this.choice.value = String(rank);
    this.waits = true;
    this.askedAt = performance.now();
    this.ask(rank);
  }

  /** Read again, unless an answer is still on its way. */
  refresh() {
    if (!this.waits || performance.now() - this.askedAt > LOST_MS) this.open(this.rank);
  }

  show(message) {
    if (message.rank !== this.rank) return;
    this.waits = false;
    if (message.text === this.text && this.lines.childNodes.length) return;
    this.text = message.text;
    this.cut = message.cut;
    this.fill();
  }

  fill() {
    const wanted = this.search.value.toLowerCase();
    const end = this.lines.scrollTop + this.lines.clientHeight >= this.lines.scrollHeight - 30;
    const all = this.text.split("\n");
    if (all[all.length - 1] === "") all.pop();
    const found = wanted ? all.filter((line) => line.toLowerCase().includes(wanted)) : all;
    const shown = found.slice(-MOST);
    this.lines.replaceChildren(
      ...(this.cut ? [h("div", { class: "mbd-muted" }, "(what was printed before this is not kept)")] : []),
      ...shown.map((line) => this.line(line, wanted)));
    if (!shown.length) this.lines.append(h("div", { class: "mbd-muted" }, wanted ? "nothing like it" : "nothing was printed"));
    this.count.textContent = wanted ? `${found.length} of ${all.length} lines` : `${all.length} lines${all.length > MOST ? `, the last ${MOST} shown` : ""}`;
    if (end) this.lines.scrollTop = this.lines.scrollHeight;
  }

  line(text, wanted) {
    const at = wanted ? text.toLowerCase().indexOf(wanted) : -1;
    const start = Math.max(0, at - LONGEST / 2);
    const part = text.slice(start, start + LONGEST);
    const element = h("div", { class: "mbd-line" });
    if (start > 0) element.append(h("span", { class: "mbd-muted" }, `… ${start} characters before … `));
    if (at >= 0) {
      const here = at - start;
      element.append(part.slice(0, here), h("mark", {}, part.slice(here, here + wanted.length)), part.slice(here + wanted.length));
    } else element.append(part);
    const rest = text.length - start - part.length;
    if (rest > 0) element.append(h("span", { class: "mbd-muted" }, ` … ${rest} more characters`));
    return element;
  }
}
