// The page of one job: does it train, what broke last, where did the time go.
import { Carpet } from "./carpet.js";
import { Pace } from "./chart.js";
import { card, facts, h, pill, redraw, replace, table, titled } from "./dom.js";
import { ago, count, duration, moment, pace, percent, plural, span } from "./format.js";
import { lanesView, resultOf, toneOf } from "./incident.js";
import { follow, get, jobUrl } from "./live.js";

const STATES = { Idle: "nothing to repair", Shrunk: "trains with fewer ranks", Ended: "ended" };

export function jobPage(job, root, say, failed) {
  const hero = h("section", { class: "card hero unknown" }, h("p", { class: "quiet" }, "Loading…"));
  const last = h("div", {});
  const carpet = new Carpet();
  const chart = new Pace();
  const list = h("div", {});
  const about = h("div", {});
  replace(root, hero, last,
    card("Ranks", carpet.controls, ...carpet.elements),
    h("div", { class: "columns" }, card("Steps per second", null, chart.element), about),
    list);
  let view = null;
  let disconnected = false;
  let shownIncident = "";

  function render() {
    if (!view) return;
    hero.className = `card hero ${disconnected ? "unknown" : view.health}`;
    replace(hero, heroOf(view, disconnected));
    redraw(about, aboutRows(view), () => card("How it recovers", null, facts(aboutRows(view))));
    redraw(list, view.incidents, () => incidentsOf(job, view));
    titled(disconnected ? "?" : view.health, view.name || job);
    if (["done", "failed"].includes(view.health)) carpet.ended ??= Date.now();
    carpet.mark(view.incidents.map((incident) => [incident.beganUnixMs, `${jobUrl(job)}/incidents/${incident.incident}`, incident.title, incident.kind]));
    showLast();
  }

  async function showLast() {
    const newest = view.incidents.find((incident) => incident.kind === "fault") ?? view.incidents[0];
    if (!newest) return replace(last);
    const key = JSON.stringify(newest);
    if (key === shownIncident) return;
    shownIncident = key;
    const incident = await get(`${jobUrl(job)}/incidents/${newest.incident}`).catch(() => null);
    if (!incident || key !== shownIncident) return;
    replace(last, lastIncident(job, incident));
    say(`${incident.title}: ${resultOf(incident)}`);
  }

  const stop = follow(job, {
    lost: (lost) => { if (lost !== disconnected) { disconnected = lost; render(); } },
    snapshot: (data) => { view = data.job; render(); carpet.set(data.carpet); chart.set(data.points, view.incidents); },
    job: (data) => { view = data.job; render(); chart.add(data.point, view.incidents); },
    carpet: (data) => carpet.add(data),
    refused: (error) => { if (!view) failed(error); },
  });
  const ticking = setInterval(() => {
    if (document.visibilityState !== "visible") return;
    carpet.update();
    for (const time of root.querySelectorAll("time[data-at]")) time.textContent = ago(Number(time.dataset.at));
  }, 1000);
  return () => { stop(); clearInterval(ticking); };
}

function heroOf(view, disconnected) {
  const headline = disconnected ? "No connection to the dashboard: this is the last known state" : view.headline;
  const up = view.startedUnixMs ? Date.now() - view.startedUnixMs : 0;
  const over = ["done", "failed"].includes(view.health);
  const left = !over && view.totalSteps && view.stepsPerS ? ((view.totalSteps - view.step) / view.stepsPerS) * 1000 : 0;
  const training = view.phases.training ?? 0;
  const figures = [
    ["step", count(view.step), view.totalSteps ? ` of ${count(view.totalSteps)}` : ""],
    ["steps per second", pace(view.stepsPerS), ""],
    ["goodput", percent(view.goodput), ""],
    ["ranks training", count(training), ` of ${count(view.world)}`],
    ["nodes", count(view.nodes), view.spares ? ` + ${plural(view.spares, "spare")}` : ""],
    ["incidents", count(view.incidents.filter((incident) => incident.kind === "fault").length), view.lostMs ? ` ${duration(view.lostMs)} lost` : ""],
  ];
  return [
    h("h1", {}, h("span", { class: "dot", "aria-hidden": "true" }), headline),
    h("p", { class: "sub" }, up && !over ? `up ${span(up)}` : "", left > 0 ? ` · about ${span(left)} left` : "", view.leader && !over ? ` · manager on node ${view.leader.node}${view.leader.host ? ` (${view.leader.host})` : ""}` : ""),
    h("dl", { class: "figures" }, figures.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, more))))),
    view.goodput && up && !over ? timeBar(view, up) : null,
    ...view.stragglers.map((slow) => h("p", { class: "alert slow" }, `Rank ${slow.rank} slows all others down by ${percent(slow.slower)} of a step: ${slow.cause}. ${slow.evidence}`)),
    ...view.trouble.map((rank) => h("p", { class: "alert failed" }, `Rank ${rank.rank} (${rank.phase}): ${rank.note}`)),
  ];
}

// Where the time since the start went: committed steps, incidents, and the rest.
function timeBar(view, up) {
  const steps = Math.min(1, view.goodput);
  const lost = Math.min(1 - steps, view.lostMs / up);
  const parts = [["training", "in committed steps", steps], ["gone", "lost in incidents", lost], ["done", "start, pauses, other", Math.max(0, 1 - steps - lost)]];
  const bar = h("div", { class: "share", "aria-hidden": "true" }, parts.map(([colour, , share]) => {
    const part = h("i", { class: `swatch-${colour}` });
    part.style.width = `${100 * share}%`;
    return part;
  }));
  return h("div", { class: "times" }, bar, h("div", { class: "legend" }, parts.map(([colour, name, share]) => h("span", {}, h("i", { class: `swatch-${colour}` }), `${name} ${(100 * share).toFixed(1)} %`))));
}

function lastIncident(job, incident) {
  const link = h("a", { href: `${jobUrl(job)}/incidents/${incident.incident}` }, "details");
  return h("section", { class: "card", id: "last" },
    h("div", { class: "head" }, h("h2", { class: "break" }, `${incident.kind === "operation" ? "Last pause" : "Last incident"}: ${incident.title}`), h("div", { class: "end" }, link)),
    h("p", { class: "small" }, pill(resultOf(incident), toneOf(incident)), h("span", { class: "quiet" }, incident.strategy ? ` by ${incident.strategy} · ` : " ", h("time", { "data-at": incident.beganUnixMs, title: moment(incident.beganUnixMs) }, ago(incident.beganUnixMs)))),
    lanesView(incident));
}

function aboutRows(view) {
  const risk = view.manager.split(" | ").find((part) => part.includes("on one node only"));
  return [
    ["may use", view.strategies.join(" → ")],
    ["now", STATES[view.state] ?? (view.strategy || view.state)],
    ["last decision", view.because],
    ["at", view.because && view.changedUnixMs ? moment(view.changedUnixMs) : ""],
    ["at risk", risk ?? ""],
    ["recording", view.profiling === "off" ? "" : view.profiling],
    ["operation", view.operation],
  ];
}

function incidentsOf(job, view) {
  if (!view.incidents.length) return card("Incidents", null, h("p", { class: "quiet" }, "None so far. When a rank, a link or a node fails, it appears here with the reason of every decision."));
  const rows = view.incidents.map((incident) => h("tr", {},
    h("td", { class: "nowrap" }, h("a", { href: `${jobUrl(job)}/incidents/${incident.incident}` }, `${incident.incident}`)),
    h("td", { class: "nowrap" }, moment(incident.beganUnixMs)),
    h("td", { class: "wide" }, incident.title),
    h("td", { class: "nowrap" }, incident.strategy),
    h("td", { class: "nowrap" }, pill(resultOf(incident), toneOf(incident)))));
  return card("Incidents", null, table(["Incident", "Began", "What happened", "Strategy", "Result"], rows, "Incidents"));
}
