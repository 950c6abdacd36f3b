// How ranks, bytes and times are written and read. Knows no page.

/** @param {Iterable<number>} ranks @returns {string} `0-2,5`; "" for none */
export function formatRanks(ranks) {
  const spans = [];
  for (const rank of [...new Set(ranks)].sort((a, b) => a - b)) {
    const last = spans[spans.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank;
    else spans.push([rank, rank]);
  }
  return spans.map(([low, high]) => (low === high ? `${low}` : `${low}-${high}`)).join(",");
}

/** @param {string} text `0-2,5` @returns {number[]} */
export function parseRanks(text) {
  const ranks = [];
  for (const part of text.split(",")) {
    const found = /^\s*(\d+)\s*(?:-\s*(\d+))?\s*$/.exec(part);
    if (!found) continue;
    const low = Number(found[1]);
    const high = Math.min(Number(found[2] ?? low), low + 100000);
    for (let rank = low; rank <= high; rank++) ranks.push(rank);
  }
  return ranks;
}

/** @param {string} ranks `0-2,5` @returns {string} `ranks 0-2,5` */
export function nameRanks(ranks) {
  return /^\d+$/.test(ranks) ? `rank ${ranks}` : `ranks ${ranks}`;
}

/** @param {number | null | undefined} bytes */
export function formatBytes(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = bytes;
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toPrecision(3)} ${units[unit]}`;
}

/** @param {number} seconds */
export function formatSeconds(seconds) {
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

/** A number of any size in few characters. @param {number} value */
export function formatNumber(value) {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(1).replace("e+", "e");
  return size >= 1000 ? String(Math.round(value)) : String(Number(value.toPrecision(3)));
}
