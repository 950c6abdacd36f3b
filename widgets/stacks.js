// The stacks of many ranks as one tree: where they part is where to look.

import { button, copyText, h } from "./dom.js";
import { nameRanks } from "./words.js";

/** @typedef {{function: string, where: string, source?: string, ranks: string, user: boolean, children: Node_[]}} Node_ */

const DEEPEST = 400;

/** @param {any} message @param {() => void} again */
export function showStacks(message, again) {
  const tree = h("ul", { class: "mbd-tree", role: "tree", "aria-label": "merged stacks" });
  grow(tree, message.tree, "", 0);
  return [
    h("div", { class: "mbd-toolbar" },
      h("span", { class: "mbd-muted" }, `${message.title}, at ${new Date().toLocaleTimeString()}`),
      button("Take again", again),
      button("Copy as text", () => copyText(message.text)),
    ),
    ...message.problems.map((problem) => h("p", { class: "mbd-problem" }, problem)),
    message.tree.length ? tree : h("p", { class: "mbd-empty" }, "No Python frames: nothing of these ranks runs."),
  ];
}

/** @param {Node_[]} nodes */
function grow(list, nodes, above, depth) {
  for (const first of nodes) {
    let node = first;
    let shown = above;
    // A run of frames that the same ranks share stands without indentation, library frames of it folded.
    let library = [];
    const item = h("li", { role: "treeitem" });
    const fold = () => {
      if (library.length === 1) item.append(frame(library[0], null));
      else if (library.length) {
        const telling = library.some((one) => !one.quiet) ? library.filter((one) => !one.quiet) : library;
        const names = [...new Set([telling[0], telling[telling.length - 1]].map((one) => one.function))];
        item.append(h("details", { class: "mbd-folded" },
          h("summary", {}, `${library.length} library frames: `, h("code", {}, names.join(" … "))),
          ...library.map((one) => frame(one, null))));
      }
      library = [];
    };
    for (;;) {
      const ranks = node.ranks === shown ? null : node.ranks;
      const leaf = !node.children.length;
      if (node.user || ranks !== null) {
        fold();
        item.append(frame(node, ranks, leaf));
      } else library.push(node);
      shown = node.ranks;
      if (node.children.length !== 1 || node.children[0].ranks !== node.ranks || ++depth > DEEPEST) break;
      node = node.children[0];
    }
    fold();
    if (node.children.length && depth <= DEEPEST) {
      const inner = h("ul", { role: "group" });
      grow(inner, node.children, shown, depth + 1);
      item.append(inner);
    }
    list.append(item);
  }
}

function frame(node, ranks, leaf = false) {
  return h("div", { class: `mbd-frame${node.user ? " mbd-user" : ""}${leaf ? " mbd-leaf" : ""}` },
    ranks !== null && h("span", { class: "mbd-ranks" }, nameRanks(ranks)),
    node.function !== "<module>" && h("code", { class: "mbd-function" }, node.function),
    h("span", { class: "mbd-where" }, node.where),
    node.source && h("code", { class: "mbd-source" }, node.source),
  );
}
