// What the page knows of the mesh: the messages of `meshbook/dashboard/view.py`, put together. Knows no page.

import { parseRanks } from "./words.js";

/** A column of an update: each value with the ranks that have it now. @typedef {[any, string][]} Column */

export class Picture {
  constructor() {
    this.mesh = "";
    /** @type {[string, number][]} */
    this.axes = [];
    /** @type {number[]} in the order of the axes */
    this.ranks = [];
    this.ended = "";
    /** @type {Record<string, Map<number, any>>} */
    this.columns = {};
    /** @type {any[]} */
    this.findings = [];
    /** @type {Map<number, number>} rank -> the finding that blames it */
    this.blamed = new Map();
    /** @type {Map<string, any>} */
    this.charts = new Map();
  }

  /** @returns {any} undefined: nothing was said of it */
  get(column, rank) {
    return this.columns[column]?.get(rank);
  }

  /** @returns {number[]} ranks that look otherwise than before */
  update(message) {
    const changed = new Set();
    if (message.full) this.columns = {};
    for (const [name, values] of Object.entries(message.columns)) {
      const column = (this.columns[name] ??= new Map());
      for (const [value, ranks] of values) {
        for (const rank of parseRanks(ranks)) {
          column.set(rank, value);
          changed.add(rank);
        }
      }
    }
    return message.full ? this.ranks : [...changed];
  }

  layout(message) {
    this.mesh = message.mesh;
    this.axes = message.axes;
    this.ranks = parseRanks(message.ranks);
    this.ended = message.ended ?? "";
  }

  setFindings(message) {
    this.findings = message.findings;
    this.blamed = new Map();
    message.findings.forEach((finding, index) => {
      for (const rank of parseRanks(finding.ranks)) if (!this.blamed.has(rank)) this.blamed.set(rank, index);
    });
  }

  addCharts(message) {
    for (const chart of message.charts) {
      const known = this.charts.get(chart.name);
      if (!known || chart.full) {
        this.charts.set(chart.name, chart);
        continue;
      }
      known.band = known.band.concat(chart.band).slice(-message.keep);
      for (const [rank, points] of Object.entries(chart.lines)) {
        known.lines[rank] = (known.lines[rank] ?? []).concat(points).slice(-message.keep);
      }
    }
  }

  /** How a rank looks: its state, but to wait in a collective is not to work. @param {number} rank */
  look(rank) {
    if (this.ended) return "ended";
    const state = this.get("state", rank) ?? "starting";
    return state === "busy" && this.get("doing", rank) ? "waiting" : state;
  }

  /** Which ranks look how, in the order in which they are met. @returns {[string, number[]][]} */
  byState() {
    const found = new Map();
    for (const rank of this.ranks) {
      const state = this.look(rank);
      if (!found.has(state)) found.set(state, []);
      found.get(state).push(rank);
    }
    return [...found];
  }

  /** One rank in a sentence, for those who hear the page. @param {number} rank */
  describe(rank) {
    const cell = this.get("cell", rank);
    const line = this.get("line", rank);
    const age = this.get("age", rank);
    return [
      `rank ${rank}`,
      this.look(rank),
      cell && (line ? `${cell}, line ${line}` : cell),
      this.get("doing", rank),
      age >= 2 && `last beat ${age} s ago`,
      this.get("exit", rank),
      this.blamed.has(rank) && "named by a finding",
    ]
      .filter(Boolean)
      .join(", ");
  }
}

/**
 * What somebody typed, as ranks: `0,2-3`, `dp=0`, `dp=0 tp=1`, `busy`.
 * @param {Picture} picture @param {string} text @returns {number[] | string} or what is wrong with it
 */
export function chooseRanks(picture, text) {
  const words = text.trim().split(/\s+/).filter(Boolean);
  let chosen = picture.ranks;
  for (const word of words) {
    const [axis, places] = word.split("=");
    let keep;
    if (places !== undefined) {
      const which = picture.axes.findIndex(([name]) => name === axis);
      if (which < 0) return `no axis ${axis}; there are ${picture.axes.map(([name]) => name).join(", ")}`;
      const stride = picture.axes.slice(which + 1).reduce((all, [, size]) => all * size, 1);
      const wanted = new Set(parseRanks(places));
      keep = new Set(picture.ranks.filter((_, index) => wanted.has(Math.floor(index / stride) % picture.axes[which][1])));
    } else if (/^[\d,-]+$/.test(word)) {
      keep = new Set(parseRanks(word));
    } else {
      keep = new Set(picture.ranks.filter((rank) => picture.look(rank) === word));
      if (!keep.size) return `no rank is ${word}; write 0,2-3 or an axis (${picture.axes[0]?.[0]}=0) or a state`;
    }
    chosen = chosen.filter((rank) => keep.has(rank));
  }
  return words.length ? chosen : [];
}
