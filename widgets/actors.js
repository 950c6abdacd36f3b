// The actors on the ranks that are shown: what waits, what runs and for how long, what went wrong last.

import { h } from "./dom.js";
import { formatSeconds } from "./words.js";

const COLUMNS = ["actor", "class", "rank", "state", "mailbox", "runs", "messages", "last error"];

export class Actors {
  /** @param {() => void} ask for the rows, once more */
  constructor(ask) {
    this.ask = ask;
    this.rows = h("tbody");
    this.note = h("p", { class: "mbd-empty", role: "status" });
    this.table = h("table", { class: "mbd-table" },
      h("thead", {}, h("tr", {}, ...COLUMNS.map((name) => h("th", { scope: "col" }, name)))), this.rows);
    this.element = h("div", { class: "mbd-actors" }, this.table, this.note);
  }

  show(message) {
    this.table.hidden = !message.rows.length;
    this.note.textContent = message.rows.length ? "" : "No actors are here: mesh.spawn(name, Class) makes some.";
    this.rows.replaceChildren(...message.rows.map((row) => h("tr", { class: row.state === "failed" ? "mbd-actor-failed" : null },
      h("td", {}, row.actor), h("td", {}, row.class), h("td", { class: "mbd-number" }, String(row.rank)), h("td", {}, row.state),
      h("td", { class: `mbd-number${row.mailbox ? " mbd-is-waiting" : ""}` }, String(row.mailbox)),
      h("td", {}, row.running ? `${row.running} for ${formatSeconds(row.seconds)}` : ""),
      h("td", { class: "mbd-number" }, String(row.messages)),
      h("td", { class: "mbd-actor-error" }, row.error))));
  }
}
