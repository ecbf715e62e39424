// Ranks or nodes over time, on a canvas. Only the rows in view are painted.
import { choice, h } from "./dom.js";
import { clock, plural } from "./format.js";

const SEVERITY = [5, 0, 3, 4, 2, 1]; // gone, training, parked, repairing, joining, done
const WINDOWS = [[60000, "1 min"], [300000, "5 min"], [1800000, "30 min"], [0, "all"]];
const NONE = 255;

export class Carpet {
  constructor() {
    this.names = [];
    this.ranks = 0;
    this.nodes = [];
    this.runs = [];
    this.span = 300000;
    this.byNode = false;
    this.chosen = false;
    this.ended = null;
    this.canvas = h("canvas", { role: "img" });
    this.labels = h("div", { class: "names", "aria-hidden": "true" });
    this.marks = h("div", { class: "marks", role: "group", "aria-label": "Incidents in this time" });
    this.incidents = [];
    this.tall = h("div", { class: "tall" }, this.canvas, this.labels);
    this.box = h("div", { class: "carpet", tabindex: "0", role: "region", "aria-label": "Ranks over time" }, this.tall);
    this.axis = h("div", { class: "axis", "aria-hidden": "true" });
    this.fold = h("span", {});
    this.tip = h("div", { class: "tip", hidden: true });
    this.legend = h("div", { class: "legend" });
    this.controls = [this.fold, choice("Time shown", WINDOWS, this.span, (span) => { this.span = span; this.update(); })];
    this.box.addEventListener("scroll", () => this.later(), { passive: true });
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    new ResizeObserver(() => this.update()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.update());
  }

  get elements() {
    return [this.legend, this.marks, this.box, this.axis, this.tip];
  }

  set(data) {
    this.names = data.names;
    this.ranks = data.ranks;
    this.nodes = data.nodes;
    this.runs = data.runs;
    if (!this.chosen) this.byNode = this.ranks > 128 && this.nodes.length > 1;
    this.legend.replaceChildren(...["training", "parked", "repairing", "gone", "joining", "done"].map((name) => h("span", {}, h("i", { class: `swatch-${name}` }), name)));
    this.fold.replaceChildren(this.nodes.length > 1 ? choice("Rows", [[false, "ranks"], [true, "nodes"]], this.byNode, (byNode) => { this.byNode = byNode; this.chosen = true; this.update(); }) : "");
    this.update();
  }

  add(change) {
    this.nodes = change.nodes;
    for (const run of change.runs) this.ranks = Math.max(this.ranks, run[2] + 1);
    this.runs = [...this.runs, ...change.runs].sort((a, b) => a[0] - b[0]).slice(-20000);
    this.update();
  }

  // `[time, address, title, kind]` of each incident: a link above the carpet.
  mark(incidents) {
    this.incidents = incidents;
    this.pins();
  }

  pins() {
    if (!this.to) return;
    const inside = this.incidents.filter(([at]) => at >= this.from && at <= this.to).slice(0, 60);
    const key = inside.map(([at, href]) => `${href} ${Math.round((1000 * (at - this.from)) / (this.to - this.from))}`).join();
    if (key === this.pinned) return;
    this.pinned = key;
    const focused = document.activeElement?.closest?.(".marks a")?.getAttribute("href");
    this.marks.replaceChildren(...inside.map(([at, href, title, kind]) => {
      const pin = h("a", { href, title, class: kind, "aria-label": `Incident at ${clock(at)}: ${title}` });
      pin.style.left = `${(100 * (at - this.from)) / (this.to - this.from)}%`;
      return pin;
    }));
    if (focused) [...this.marks.children].find((pin) => pin.getAttribute("href") === focused)?.focus();
  }

  rows() {
    if (this.byNode) return this.nodes.map(([first, last, node]) => [first, last, `node ${node}`]);
    return Array.from({ length: this.ranks }, (_, rank) => [rank, rank, `rank ${rank}`]);
  }

  // The whole grid: one byte per row and column, the worst phase that occurred in that time.
  update() {
    const width = this.box.clientWidth;
    if (!width || !this.runs.length) return;
    const now = this.ended ?? Date.now();
    const first = this.runs[0][0];
    const known = Math.max(now - first, 30000);
    const span = Math.min(this.span || known, known);
    const [from, to] = [now - span, now];
    const rows = this.rows();
    const columns = Math.max(1, Math.round(width));
    const rowOf = new Int32Array(this.ranks).fill(-1);
    rows.forEach(([low, high], row) => rowOf.fill(row, low, high + 1));
    const phases = new Uint8Array(this.ranks).fill(NONE);
    const current = new Uint8Array(rows.length).fill(NONE);
    const grid = new Uint8Array(columns * rows.length);
    const worst = (row) => {
      let found = NONE;
      for (let rank = rows[row][0]; rank <= rows[row][1]; rank++) found = worse(found, phases[rank]);
      return found;
    };
    const apply = (run) => {
      phases.fill(run[3], run[1], run[2] + 1);
      const [low, high] = [rowOf[run[1]], rowOf[Math.min(run[2], this.ranks - 1)]];
      for (let row = Math.max(0, low); row <= high; row++) current[row] = worst(row);
      return [Math.max(0, low), high];
    };
    let next = 0;
    while (next < this.runs.length && this.runs[next][0] <= from) {
      phases.fill(this.runs[next][3], this.runs[next][1], this.runs[next][2] + 1);
      next++;
    }
    for (let row = 0; row < rows.length; row++) current[row] = worst(row);
    for (let column = 0; column < columns; column++) {
      const until = from + ((column + 1) * span) / columns;
      for (let row = 0; row < rows.length; row++) grid[row * columns + column] = current[row];
      while (next < this.runs.length && this.runs[next][0] < until) {
        const [low, high] = apply(this.runs[next++]);
        for (let row = low; row <= high; row++) {
          const at = row * columns + column;
          grid[at] = worse(grid[at], current[row]);
        }
      }
    }
    Object.assign(this, { grid, columns, from, to, shown: rows, colours: palette(this.names) });
    const height = rows.length <= 16 ? 20 : rows.length <= 64 ? 9 : rows.length <= 140 ? 5 : 4;
    this.rowHeight = height;
    this.tall.style.height = `${rows.length * height}px`;
    const names = height === 20 ? rows.map(([, , name]) => name) : [];
    if (names.join() !== this.named) {
      this.named = names.join();
      this.labels.replaceChildren(...names.map((name) => h("span", {}, name)));
    }
    this.pins();
    this.label(phases, rows);
    this.ticks(from, span);
    this.later();
  }

  later() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => { this.pending = 0; this.paint(); });
  }

  paint() {
    if (!this.grid) return;
    const height = Math.min(this.box.clientHeight || 420, this.shown.length * this.rowHeight);
    if (!height) return;
    const { canvas, colours, columns, grid, rowHeight } = this;
    if (canvas.width !== columns || canvas.height !== height) [canvas.width, canvas.height] = [columns, height];
    canvas.style.height = `${height}px`;
    if (this.image?.width !== columns || this.image.height !== height) this.image = new ImageData(columns, height);
    const pixels = new Uint32Array(this.image.data.buffer).fill(0);
    const top = Math.floor(this.box.scrollTop);
    const gap = rowHeight > 4 ? 1 : 0;
    for (let y = 0; y < height; y++) {
      const row = Math.floor((y + top) / rowHeight);
      if (row >= this.shown.length || (y + top) % rowHeight >= rowHeight - gap) continue;
      const line = y * columns;
      if (y && (y + top) % rowHeight) {
        pixels.copyWithin(line, line - columns, line);
        continue;
      }
      const first = row * columns;
      for (let x = 0; x < columns; x++) pixels[line + x] = colours[grid[first + x]];
    }
    canvas.getContext("2d").putImageData(this.image, 0, 0);
  }

  label(phases, rows) {
    const tally = new Map();
    for (const phase of phases) tally.set(phase, (tally.get(phase) ?? 0) + 1);
    const now = [...tally].filter(([phase]) => phase !== NONE).map(([phase, number]) => `${number} ${this.names[phase]}`).join(", ");
    this.canvas.setAttribute("aria-label", `${plural(rows.length, this.byNode ? "node" : "rank")} over time. Now: ${now || "unknown"}.`);
  }

  ticks(from, span) {
    this.axis.replaceChildren(...[0.06, 0.28, 0.5, 0.72, 0.94].map((share) => {
      const tick = h("span", {}, clock(from + share * span));
      tick.style.left = `${100 * share}%`;
      return tick;
    }));
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top + this.box.scrollTop) / this.rowHeight);
    const column = Math.floor(((event.clientX - box.left) / box.width) * this.columns);
    const phase = this.grid?.[row * this.columns + column];
    this.tip.hidden = !this.shown?.[row] || phase === undefined;
    if (this.tip.hidden) return;
    const at = this.from + (column / this.columns) * (this.to - this.from);
    this.tip.textContent = `${this.shown[row][2]}: ${this.names[phase] ?? "not known"} · ${clock(at)}`;
    this.tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 190)}px`;
    this.tip.style.top = `${event.clientY + 14}px`;
  }
}

function worse(a, b) {
  if (a === NONE) return b;
  if (b === NONE) return a;
  return SEVERITY[b] > SEVERITY[a] ? b : a;
}

function palette(names) {
  const style = getComputedStyle(document.documentElement);
  const colours = new Uint32Array(256);
  names.forEach((name, code) => {
    const value = style.getPropertyValue(`--${name}`).trim();
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(value.slice(at, at + 2), 16));
    colours[code] = (255 << 24) | (b << 16) | (g << 8) | r;
  });
  return colours;
}
