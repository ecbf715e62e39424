// Steps per second over time, with a mark for each incident.
import uPlot from "./vendor/uPlot.esm.js";
import { h } from "./dom.js";
import { clock } from "./format.js";

const INCREMENTS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];

export class Pace {
  constructor() {
    this.points = [];
    this.incidents = [];
    this.element = h("div", { class: "pace", role: "img", "aria-label": "Steps per second over time" });
    new ResizeObserver(() => this.build()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
  }

  set(points, incidents) {
    this.points = points;
    this.incidents = incidents;
    this.build();
  }

  add(point, incidents) {
    this.incidents = incidents;
    if (!point || this.points.at(-1)?.[0] === point[0]) return this.plot?.redraw();
    this.points.push(point);
    if (this.points.length > 3600) this.points.shift();
    this.plot ? this.plot.setData(this.data()) : this.build();
  }

  data() {
    // A second has few steps: the mean of some seconds shows the pace, single ones only noise.
    const width = this.points.length > 60 ? 5 : 1;
    const mean = (at) => {
      const near = this.points.slice(Math.max(0, at - width + 1), at + 1);
      return near.reduce((sum, point) => sum + point[2], 0) / near.length;
    };
    return [this.points.map((point) => point[0] / 1000), this.points.map((_, at) => mean(at))];
  }

  build() {
    const width = this.element.clientWidth;
    if (!width || this.points.length < 2) return;
    this.plot?.destroy();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const mark = (plot) => {
      const { ctx, bbox } = plot;
      ctx.save();
      for (const incident of this.incidents) {
        const x = plot.valToPos(incident.beganUnixMs / 1000, "x", true);
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.fillStyle = colour(incident.kind === "operation" ? "--done" : "--gone");
        ctx.fillRect(x, bbox.top, 2, bbox.height);
      }
      ctx.restore();
    };
    this.plot = new uPlot({
      width, height: 190, padding: [8, 26, 0, 0], legend: { show: false }, cursor: { y: false, drag: { x: true, y: false } },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(high * 1.15, 0.1)] } },
      axes: [{ ...axis, size: 28, space: 90, incrs: INCREMENTS, values: (_, times) => times.map((time) => clock(1000 * time)) }, { ...axis, size: 46 }],
      series: [{}, { stroke: colour("--good"), width: 2, fill: colour("--good-soft"), points: { show: false } }],
      hooks: { draw: [mark] },
    }, this.data(), this.element);
  }
}
