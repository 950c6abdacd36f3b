// What is wrong, in words, with what can be done about it.

import { button, copyText, h } from "./dom.js";
import { nameRanks } from "./words.js";

// Of ranks that are no more.
const ENDED = ["killed", "out-of-memory", "host-silent"];

/**
 * @param {import("./picture.js").Picture} picture
 * @param {{select: (ranks: string) => void, act: (kind: string, ranks: string) => void, why: () => void}} can
 * @param {string | null} empty what to say where nothing is wrong; null: nothing
 */
export function showFindings(picture, can, empty) {
  if (!picture.findings.length) return empty ? [h("p", { class: "mbd-fine" }, empty)] : [];
  return picture.findings.map((finding) =>
    h("article", { class: `mbd-finding mbd-${finding.severity}`, tabindex: "-1" },
      h("h3", {}, h("span", { class: "mbd-sign", "aria-hidden": "true" }, finding.severity === "note" ? "i" : "!"), finding.text),
      finding.evidence.length > 0 &&
        h("ul", {}, ...finding.evidence.map((line) => h("li", {}, line))),
      finding.next && h("p", { class: "mbd-next" }, h("b", {}, "Next: "), finding.next),
      h("div", { class: "mbd-toolbar" },
        finding.ranks && button(`Select ${nameRanks(finding.ranks)}`, () => can.select(finding.ranks)),
        finding.ranks && button("Stacks", () => can.act("stacks", finding.involved || finding.ranks)),
        finding.ranks && !ENDED.includes(finding.kind) && button("Debug", () => can.act("debug", finding.involved || finding.ranks)),
        button("Interrupt", () => can.act("interrupt", finding.involved || finding.ranks)),
        finding.ranks && button("Kill…", () => can.act("kill", finding.ranks), { class: "mbd-button mbd-danger" }),
        button("Copy as text", () => copyText(finding.copy)),
      ),
    ),
  );
}
