// Where each rank's tile stands: arithmetic on the mesh's axes and the width there is. Knows no page.

/** @typedef {{x: number, y: number, row: number}} Place of one tile's upper left corner */
/** @typedef {{x: number, y: number, width: number, text: string, ranks: number[], side: boolean}} Header */

/** Tile sizes, the most telling first: width, height, and how far a width may stretch. */
const SIZES = [
  { name: "large", width: 150, height: 84, most: 230, gap: 6 },
  { name: "medium", width: 84, height: 46, most: 120, gap: 4 },
  { name: "small", width: 30, height: 26, most: 44, gap: 3 },
  { name: "tiny", width: 19, height: 15, most: 30, gap: 2 },
];
const TALLEST = 540; // pixels that tiles may take before smaller ones are tried
const TITLE = 18; // height of a line of headers
const SIDE = 68; // width of the headers at the left

/**
 * Tiles of one place of the last axis stand side by side, those of the axis before it below each other, or beside each
 * other where they are short; each place of the axes before those is a block with a title.
 *
 * @param {[string, number][]} axes
 * @param {number[]} ranks in the axes' order
 * @param {number} width pixels
 */
export function layOut(axes, ranks, width) {
  let plan;
  for (const size of SIZES) {
    plan = tryOut(axes, ranks, width, size);
    if (plan.height <= TALLEST && plan.width <= width) break;
  }
  return plan;
}

function tryOut(axes, ranks, width, size) {
  const sizes = axes.length ? axes.map(([, count]) => count) : [ranks.length];
  const names = axes.length ? axes.map(([name]) => name) : ["rank"];
  const last = sizes[sizes.length - 1] || 1;
  const inBlock = sizes.length > 1 ? sizes[sizes.length - 2] : 1;
  const single = sizes.length === 1;
  const room = width - SIDE;
  const step = size.width + size.gap;
  const fitting = Math.max(1, Math.floor((room + size.gap) / step));

  // One row of tiles is `across` long: all of the last axis, or a round part of it.
  const across = last <= fitting ? last : roundDown(fitting);
  const tall = (inBlock * (size.height + size.gap) * ranks.length) / (last * inBlock);
  const beside = single || across < last || tall <= TALLEST / 2 ? 1 : Math.max(1, Math.min(inBlock, roundDown(Math.floor((room + 10) / (across * step + 10)))));
  const columns = across * beside;
  const tile = Math.min(size.most, Math.floor((room - (beside - 1) * 10) / columns) - size.gap);
  const tileWidth = Math.max(size.width, tile);
  const groupWidth = across * (tileWidth + size.gap) + 10;

  /** @type {Place[]} */
  const places = [];
  /** @type {Header[]} */
  const headers = [];
  const blocks = ranks.length / (last * inBlock);
  let y = 2; // room for the outline of what is chosen
  let row = 0;
  const columnHeaders = !single && beside === 1 && across === last && tileWidth >= 19;
  for (let block = 0; block < blocks; block++) {
    const start = block * last * inBlock;
    if (blocks > 1) {
      const mine = ranks.slice(start, start + last * inBlock);
      headers.push({ x: SIDE, y, width: 200, text: blockTitle(names, sizes, block), ranks: mine, side: false, block: true });
      y += TITLE;
    }
    if (columnHeaders) {
      for (let place = 0; place < last; place++) {
        const mine = ranks.filter((_, index) => index % last === place);
        const text = tileWidth >= 44 ? `${names[names.length - 1]}=${place}` : `${place}`;
        headers.push({ x: SIDE + place * (tileWidth + size.gap), y, width: tileWidth, text, ranks: mine, side: false });
      }
      y += TITLE;
    }
    for (let group = 0; group < inBlock; group += beside) {
      for (let part = 0; part < last; part += across) {
        for (let next = 0; next < beside && group + next < inBlock; next++) {
          for (let place = part; place < Math.min(last, part + across); place++) {
            places.push({ x: SIDE + next * groupWidth + (place - part) * (tileWidth + size.gap), y, row });
          }
        }
        const first = start + group * last + part;
        const mine = ranks.slice(first, beside > 1 ? first + beside * last : Math.min(first + across, first - part + last));
        headers.push({ x: 0, y, width: SIDE - 8, text: rowTitle(names, single, group, beside, inBlock, part, mine), ranks: mine, side: true });
        y += size.height + size.gap;
        row += 1;
      }
    }
    y += blocks > 1 ? 8 : 0;
  }
  return {
    size: size.name, tileWidth, tileHeight: size.height, places, headers, height: Math.max(1, y), width: SIDE + beside * groupWidth - 10,
  };
}

function rowTitle(names, single, group, beside, inBlock, part, mine) {
  const numbers = mine.length > 1 ? `${mine[0]}–${mine[mine.length - 1]}` : `${mine[0]}`;
  if (single || part > 0) return numbers.length > 5 ? numbers : `${mine.length > 1 ? "ranks" : "rank"} ${numbers}`;
  const name = names[names.length - 2];
  return beside === 1 ? `${name}=${group}` : `${name} ${group}–${Math.min(inBlock, group + beside) - 1}`;
}

function blockTitle(names, sizes, block) {
  const words = [];
  for (let axis = sizes.length - 3; axis >= 0; axis--) {
    words.unshift(`${names[axis]}=${block % sizes[axis]}`);
    block = Math.floor(block / sizes[axis]);
  }
  return words.join(" · ");
}

/** The largest number that people count in: 1, 2, 4, 8, and from there in eights. */
function roundDown(count) {
  if (count >= 64) return Math.floor(count / 32) * 32;
  if (count >= 8) return Math.floor(count / 8) * 8;
  return count >= 4 ? 4 : count >= 2 ? 2 : 1;
}
