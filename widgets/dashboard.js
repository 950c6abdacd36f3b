// The dashboard: what the mesh's messages say, drawn, and what is pressed, said back. One of these per place on a page.
//
// It decides nothing about ranks. Messages come as `meshbook/dashboard/view.py` makes them; `link` is a widget's model
// or a websocket.

import { Actors } from "./actors.js";
import { Charts } from "./charts.js";
import { button, copyText, h, isDark } from "./dom.js";
import { showFindings } from "./findings.js";
import { Logs } from "./logs.js";
import { Picture, chooseRanks } from "./picture.js";
import { showStacks } from "./stacks.js";
import { Tiles } from "./tiles.js";
import { Timeline } from "./timeline.js";
import { formatRanks, nameRanks, parseRanks } from "./words.js";

/** @typedef {{send: (message: any) => void, listen: (heard: (message: any) => void) => (() => void), page?: boolean}} Link */

const STALE_MS = 12000; // without a message; one comes every 5 s, unless the mesh has been idle for long
const ANSWER_MS = 8000; // for an answer to what was pressed
const ACTORS_MS = 1000; // between two looks at the actors, while they are shown
const LOG_MS = 2000; // between two readings of the log that is shown, while its rank works

/**
 * Draws a dashboard into an element until the function it returns is called.
 * @param {HTMLElement} place @param {Link} link @returns {() => void}
 */
export function mountDashboard(place, link) {
  const board = new Dashboard(place, link);
  return () => board.close();
}

class Dashboard {
  constructor(place, link) {
    this.link = link;
    this.view = Math.random().toString(36).slice(2, 10);
    this.picture = new Picture();
    this.tiles = new Tiles(this.picture, { onselect: (ranks) => this.selected(ranks), onopen: () => this.open("stacks") });
    this.memory = new Charts((name) => name.startsWith("."), "Nothing has been measured yet.");
    this.scalars = new Charts((name) => !name.startsWith("."), "Numbers that ranks give to meshbook.log(loss=…, step=…) are drawn here.");
    this.timeline = new Timeline();
    this.logs = new Logs((rank) => this.say({ kind: "logs", rank }));
    this.actors = new Actors(() => this.say({ kind: "actors" }));
    this.tab = "";
    this.heardAt = null;

    this.title = h("strong", { class: "mbd-name", role: "heading", "aria-level": "1" }, "…");
    this.states = h("span", { class: "mbd-states" });
    this.live = h("span", { class: "mbd-live", role: "status" }, "waiting for the mesh");
    this.summary = h("p", { class: "mbd-unseen", "aria-live": "polite" });
    this.findings = h("section", { class: "mbd-findings", "aria-label": "Findings" });
    this.choice = h("input", { class: "mbd-input", type: "text", placeholder: "0,2-3 or dp=0", "aria-label": "select ranks",
      onkeydown: (event) => event.key === "Enter" && this.choose() });
    this.chosen = h("span", { class: "mbd-chosen", role: "status" });
    this.actions = h("div", { class: "mbd-toolbar mbd-actions" },
      h("label", {}, h("span", { class: "mbd-muted" }, "select "), this.choice), this.chosen, h("span", { class: "mbd-space" }),
      button("Why?", () => this.act("why")), button("Stacks", () => this.act("stacks")),
      this.debug = button("Debug", () => this.act("debug")), this.replay = button("Replay", () => this.showReplay()), button("Interrupt", () => this.act("interrupt")),
      button("Kill…", () => this.act("kill"), { class: "mbd-button mbd-danger" }));
    this.confirm = h("div", { class: "mbd-confirm", role: "alertdialog", "aria-label": "confirm", hidden: true });
    this.told = h("p", { class: "mbd-told", role: "status", hidden: true });
    this.tabs = h("div", { class: "mbd-tabs", role: "tablist", onkeydown: (event) => this.tabKey(event) });
    this.panels = {
      stacks: h("div", {}, h("p", { class: "mbd-empty" }, "Press Stacks, here or at a finding, to see where all ranks are, or those that are selected: one tree, which forks where they differ.")),
      logs: this.logs.element, memory: this.memory.element, collectives: this.timeline.element, scalars: this.scalars.element,
      actors: this.actors.element,
    };
    this.element = h("div", { class: "mbd", "data-lm-suppress-shortcuts": "true", dataset: { page: link.page ? "1" : "" } },
      h("header", { class: "mbd-top" }, this.title, this.states, h("span", { class: "mbd-space" }), this.live),
      this.summary, this.findings,
      h("div", { class: "mbd-body" },
        h("section", { class: "mbd-ranks-section", "aria-label": "Ranks" }, this.actions, this.confirm, this.told,
          h("div", { class: "mbd-scroll" }, this.tiles.element)),
        h("section", { class: "mbd-detail" }, this.tabs, ...Object.entries(this.panels).map(([name, panel]) => {
          panel.setAttribute("role", "tabpanel");
          panel.setAttribute("aria-label", name);
          panel.classList.add("mbd-panel");
          panel.hidden = true;
          return panel;
        }))));
    for (const name of Object.keys(this.panels)) {
      this.tabs.append(h("button", { type: "button", role: "tab", class: "mbd-tab", dataset: { tab: name }, onclick: () => this.open(name) },
        name[0].toUpperCase() + name.slice(1)));
    }
    this.tabOf("actors").hidden = this.debug.hidden = this.replay.hidden = true;
    place.append(this.element);
    this.element.dataset.theme = isDark(place) ? "dark" : "light";
    this.open("stacks", false);

    this.silence = link.listen((message) => this.hear(message));
    const theme = () => {
      const dark = isDark(place) ? "dark" : "light";
      if (this.element.dataset.theme === dark) return;
      this.element.dataset.theme = dark;
      this.tiles.arrange();
      this.drawPanel();
    };
    // Front ends swap a class or an attribute high up and a style sheet a moment later.
    const later = () => { theme(); setTimeout(theme, 150); setTimeout(theme, 800); };
    this.themes = new MutationObserver(later);
    for (const at of [document.documentElement, document.body]) this.themes.observe(at, { attributes: true });
    this.scheme = window.matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", later);
    this.themeChanged = later;
    setTimeout(theme, 300);
    this.resized = new ResizeObserver(() => this.drawPanel());
    this.resized.observe(this.element);
    this.clock = setInterval(() => this.tick(), 1000);
    this.say({ kind: "ready" });
  }

  close() {
    this.silence();
    clearInterval(this.clock);
    this.themes.disconnect();
    this.resized.disconnect();
    this.scheme.removeEventListener("change", this.themeChanged);
    this.tiles.close();
    this.element.remove();
  }

  say(message) {
    this.said = (this.said ?? 0) + 1;
    this.link.send({ ...message, view: this.view, id: `${this.view}-${this.said}` });
  }

  // ---- what is said to us

  hear(message) {
    // Every view of one widget hears what is said to any; answers are addressed.
    if (message.view && message.view !== this.view) return;
    this.heardAt = performance.now();
    this.resting = message.kind === "resting";
    if (!this.picture.mesh && message.kind !== "layout" && message.kind !== "gone") return;
    switch (message.kind) {
      case "layout": {
        const same = JSON.stringify(message) === this.layoutSaid;
        this.layoutSaid = JSON.stringify(message);
        if (same) break;
        this.picture.layout(message);
        this.title.textContent = message.mesh;
        this.tiles.arrange();
        this.selected(this.tiles.selected);
        this.tabOf("actors").hidden = !message.actors;
        this.replay.hidden = !message.replay;
        this.replayCommand = message.replay;
        break;
      }
      case "update":
        this.tiles.mark(this.picture.update(message));
        this.count();
        break;
      case "findings": {
        const before = [...this.picture.blamed.keys()];
        this.picture.setFindings(message);
        this.findings.replaceChildren(...showFindings(this.picture, {
          select: (ranks) => this.tiles.select(parseRanks(ranks)),
          act: (kind, ranks) => this.act(kind, parseRanks(ranks)),
        }, message.asked ? "Nothing wrong was found." : null));
        this.tiles.mark([...before, ...this.picture.blamed.keys()]);
        if (message.view) this.tell("");
        break;
      }
      case "charts":
        this.picture.addCharts(message);
        if (this.tab === "memory" || this.tab === "scalars") this.drawPanel();
        break;
      case "collectives":
        this.collectives = message;
        if (this.tab === "collectives") this.drawPanel();
        break;
      case "stacks":
        this.tell("");
        this.panels.stacks.replaceChildren(...showStacks(message, () => this.say({ kind: "stacks", ranks: message.ranks })));
        break;
      case "logs":
        this.logs.show(message);
        break;
      case "actors":
        this.actors.show(message);
        break;
      case "reply":
        this.tell(message.text);
        break;
      case "gone":
        this.picture.ended = message.reason;
        this.tiles.mark(this.picture.ranks);
        this.count();
        break;
    }
    this.tick();
  }

  count() {
    const states = this.picture.byState();
    const words = states.map(([state, ranks]) => `${ranks.length} ${state}`);
    const text = words.join(", ");
    this.debug.hidden = !states.some(([state]) => state === "busy" || state === "waiting");
    if (text === this.counted) return;
    this.counted = text;
    this.states.replaceChildren(...states.map(([state, ranks]) =>
      h("button", { type: "button", class: `mbd-chip mbd-is-${state}`, title: `select ${nameRanks(formatRanks(ranks))}`,
        onclick: () => this.tiles.select(ranks) }, `${ranks.length} ${state}`)));
    clearTimeout(this.saying);
    this.saying = setTimeout(() => {
      this.summary.textContent = `Mesh ${this.picture.mesh}: ${this.picture.ranks.length} ranks, ${text}; ${this.picture.findings.length} findings.`;
    }, 1500);
  }

  tick() {
    if (this.heardAt === null) return;
    const stale = performance.now() - this.heardAt;
    const ended = this.picture.ended;
    const quiet = stale > STALE_MS && !this.resting;
    this.live.className = `mbd-live${ended || quiet || this.resting ? " mbd-stale" : ""}`;
    const text = ended ? `ended: ${ended}` : quiet ? `no contact for ${Math.round(stale / 1000)} s` : this.resting ? "idle for long" : "live";
    for (const one of this.actions.querySelectorAll("button")) one.disabled = Boolean(ended || quiet);
    if (this.live.textContent !== text) this.live.textContent = text;
    const second = Math.floor(performance.now() / ACTORS_MS);
    if (this.tab === "actors" && second !== this.surveyedAt && !ended && !document.hidden) {
      this.surveyedAt = second;
      this.actors.ask();
    }
    const now = Math.floor(performance.now() / LOG_MS);
    if (this.tab === "logs" && now !== this.readAt && this.picture.get("state", this.logs.rank) === "busy") {
      this.readAt = now;
      this.logs.refresh();
    }
  }

  // ---- what is done here

  selected(ranks) {
    const some = formatRanks(ranks);
    this.chosen.textContent = ranks.size ? `${ranks.size} of ${this.picture.ranks.length} selected: ${some.length > 40 ? `${some.slice(0, 38)}…` : some}` : "";
    clearTimeout(this.following);
    this.following = setTimeout(() => this.say({ kind: "follow", ranks: some }), 150);
    if (ranks.size === 1 && this.tab === "logs") this.logs.open([...ranks][0]);
  }

  choose() {
    const found = chooseRanks(this.picture, this.choice.value);
    if (typeof found === "string") this.tell(found);
    else {
      this.tell("");
      this.tiles.select(found);
    }
  }

  /** @param {string} kind @param {number[]} [ranks] none: those selected, or all */
  act(kind, ranks) {
    const whom = ranks ?? (this.tiles.selected.size ? [...this.tiles.selected] : this.picture.ranks);
    const some = formatRanks(whom);
    if (!some) {
      this.tell("the mesh has not been heard of yet");
      return;
    }
    if (kind === "kill") {
      if (!ranks && !this.tiles.selected.size) {
        this.tell("select the ranks to kill first");
        return;
      }
      this.ask(`Kill ${nameRanks(some)}? What they hold is lost, and the cell that runs ends with RankLost.`, `Kill ${nameRanks(some)}`,
        () => this.say({ kind, ranks: some }));
      return;
    }
    if (kind === "stacks") this.open("stacks", false);
    const doing = { stacks: "taking stacks of", debug: "stopping in the debugger:", interrupt: "interrupting", why: "looking at" }[kind];
    const text = `${doing} ${nameRanks(some)} …`;
    this.tell(text);
    clearTimeout(this.waitingFor);
    this.waitingFor = setTimeout(() => this.told.textContent === text && this.tell(`${text} no answer yet`), ANSWER_MS);
    this.say({ kind, ranks: some });
  }

  showReplay() {
    copyText(this.replayCommand);
    this.tell(`copied; in a terminal it runs the last failure again, in one process: ${this.replayCommand}`);
  }

  ask(question, yes, then) {
    const done = () => {
      this.confirm.hidden = true;
      this.tiles.box.focus();
    };
    const cancel = button("Cancel", done);
    this.confirm.replaceChildren(h("span", {}, question), h("div", { class: "mbd-toolbar" },
      button(yes, () => { done(); then(); }, { class: "mbd-button mbd-danger mbd-sure" }), cancel));
    this.confirm.onkeydown = (event) => {
      if (event.key === "Escape") done();
    };
    this.confirm.hidden = false;
    cancel.focus();
  }

  tell(text) {
    this.told.textContent = text;
    this.told.hidden = !text;
  }

  open(name, ask = true) {
    this.tab = name;
    for (const [other, panel] of Object.entries(this.panels)) panel.hidden = other !== name;
    for (const tab of this.tabs.children) {
      const on = tab.dataset.tab === name;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
    }
    if (ask) {
      if (name === "logs") this.logs.open(this.tiles.selected.size ? [...this.tiles.selected][0] : this.logs.rank);
      if (name === "stacks") this.act("stacks");
      if (name === "actors") this.actors.ask();
      this.say({ kind: "show", tab: name });
    }
    this.drawPanel();
  }

  tabKey(event) {
    const names = Object.keys(this.panels).filter((name) => !this.tabOf(name).hidden);
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!way) return;
    const next = names[(names.indexOf(this.tab) + way + names.length) % names.length];
    this.open(next);
    this.tabOf(next)?.focus();
    event.preventDefault();
  }

  tabOf(name) {
    return [...this.tabs.children].find((tab) => tab.dataset.tab === name);
  }

  drawPanel() {
    const dark = this.element.dataset.theme === "dark";
    if (this.tab === "memory") this.memory.show(this.picture.charts, dark);
    if (this.tab === "scalars") this.scalars.show(this.picture.charts, dark);
    if (this.tab === "collectives" && this.collectives) this.timeline.show(this.collectives, dark);
  }
}
