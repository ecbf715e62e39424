// One incident: its phases beside those of earlier ones, the decisions, the evidence.
import { card, facts, h, pill, plain, table } from "./dom.js";
import { count, duration, moment, plural } from "./format.js";

const MEANING = {
  stopped: "all ranks are parked",
  decided: "the strategy is chosen",
  forked: "new processes run",
  groups: "process groups are formed",
  state: "state is copied",
  step: "the first step is committed",
  restarted: "all ranks run again",
  dumped: "the emergency checkpoint is written",
};
const COUNTERS = {
  RetransSegs: "segments sent again",
  EstabResets: "connections reset",
  AttemptFails: "connections refused",
  carrier_changes: "cable unplugged or plugged in",
  link_downed: "link lost",
};
const TAIL = 40000;
const SENTENCE = 400;

export function toneOf(incident) {
  if (incident.open) return "recovering";
  if (incident.outcome === "ended") return "failed";
  return incident.kind === "operation" ? "still" : "training";
}

export function resultOf(incident) {
  if (incident.open) return "in progress";
  if (incident.outcome === "ended") return "the job ended";
  const after = incident.kind === "operation" ? "paused for" : "training again after";
  return `${after} ${duration(incident.tookMs)}`;
}

export function lanesView({ lanes, open }, explained) {
  if (!lanes.length) return h("p", { class: "quiet" }, open ? "The phases are known once the incident is over." : "The manager has not reported the phases of this incident.");
  const all = lanes.reduce((sum, lane) => sum + lane.tookMs, 0);
  const usual = lanes.reduce((sum, lane) => sum + (lane.medianMs ?? 0), 0);
  const scale = Math.max(all, usual, 1);
  let at = 0;
  const rows = lanes.map((lane) => {
    const slow = lane.medianMs !== null && lane.tookMs > 1.5 * lane.medianMs && lane.tookMs - lane.medianMs > 20;
    const took = h("div", { class: slow ? "took over" : "took" });
    took.style.left = `${(100 * at) / scale}%`;
    took.style.width = `${(100 * lane.tookMs) / scale}%`;
    const track = h("div", { class: "track", "aria-hidden": "true" }, took);
    if (lane.medianMs !== null) {
      const mark = h("div", { class: "usual" });
      mark.style.left = `min(${(100 * (at + lane.medianMs)) / scale}%, calc(100% - 2px))`;
      track.append(mark);
    }
    at += lane.tookMs;
    const before = lane.medianMs === null ? "" : ` · usual ${duration(lane.medianMs)}`;
    return [h("span", { title: MEANING[lane.name] ?? "" }, lane.name, explained && MEANING[lane.name] ? h("span", { class: "means" }, MEANING[lane.name]) : null), track, h("span", { class: "ms" }, duration(lane.tookMs), h("span", { class: "quiet" }, before))];
  });
  return h("div", { class: "lanes" }, rows);
}

export function incidentView(incident, link, heading = "h1") {
  const parts = [hero(incident, link, heading)];
  parts.push(card("Where the time went", incident.lanes.some((lane) => lane.medianMs !== null) ? h("span", { class: "quiet small" }, "the mark is the median of earlier incidents") : null, lanesView(incident, true)));
  if (incident.ladder.length) parts.push(ladder(incident));
  parts.push(decisions(incident));
  parts.push(...incident.faults.filter((fault) => !fault.noticed).map(evidence));
  const noticed = incident.faults.filter((fault) => fault.noticed);
  if (noticed.length) parts.push(consequences(noticed));
  if (incident.ranks.length) parts.push(ranks(incident));
  if (incident.links?.length) parts.push(links(incident));
  return parts;
}

// The strategy is named before it: the reason of a decision begins with it, too.
function reasonOf({ strategy, because }) {
  const reason = strategy && because?.startsWith(`${strategy}: `) ? because.slice(strategy.length + 2) : because;
  return reason ? ` · ${reason}` : "";
}

function hero(incident, link, heading) {
  const numbers = incident.numbers.length > 1 ? `Incidents ${incident.numbers.join(", ")}` : `Incident ${incident.incident}`;
  return h("section", { class: `card hero ${toneOf(incident)}` },
    h("p", { class: "quiet small" }, numbers, " · ", moment(incident.beganUnixMs), link ? [" · ", link] : null),
    h(heading, { class: "title" }, h("span", { class: "dot", "aria-hidden": "true" }), incident.title),
    h("p", { class: "sub" }, pill(resultOf(incident), toneOf(incident)), " ", incident.strategy ? `by ${incident.strategy}` : "", reasonOf(incident)));
}

function ladder(incident) {
  const rows = incident.ladder.map((row) => h("tr", { class: row.chosen ? "" : "dim" },
    h("td", { class: "nowrap" }, row.strategy),
    h("td", {}, row.chosen ? pill("chosen", "training") : ""),
    h("td", { class: "wide" }, row.because)));
  return card("Why this strategy", null, table(["Strategy", "Choice", "Reason"], rows, `Strategies of incident ${incident.incident}`));
}

function shortened(text) {
  return text.length > SENTENCE ? `${text.slice(0, SENTENCE)}…` : text;
}

function decisions(incident) {
  const items = incident.decisions.map((line) => h("li", {},
    h("span", { class: "at" }, `+${duration(line.atMs)}`),
    h("div", {}, h("span", { class: "break" }, shortened(line.because) || "no change"),
      h("div", { class: "quiet small" }, line.before === line.after ? line.after : `${line.before} → ${line.after}`, incident.numbers.length > 1 ? ` · incident ${line.incident}` : ""),
      h("details", {}, h("summary", { class: "small" }, "messages"), h("pre", { tabindex: "0" }, [line.because, line.event, ...line.commands].map((text) => text.slice(0, TAIL)).join("\n"))))));
  return card("What was decided", null, h("ol", { class: "decisions" }, items));
}

function evidence(fault) {
  const long = fault.evidence.length > TAIL;
  const text = h("pre", { tabindex: "0" }, (long ? fault.evidence.slice(-TAIL) : fault.evidence) || "nothing was recorded");
  const all = long ? h("button", { type: "button", onclick: () => { text.textContent = plain(fault.evidence); all.remove(); } }, `show all ${count(fault.evidence.length)} characters`) : null;
  const where = fault.node >= 0 ? `node ${fault.node}${fault.host ? ` (${fault.host})` : ""}` : "";
  return card(`Evidence: rank ${fault.rank}`, all, facts([["cause", fault.cause], ["where", where]]), text);
}

// Ranks whose collectives failed because of another rank: they are not the cause.
function consequences(faults) {
  return card(`${plural(faults.length, "rank")} noticed it`, h("span", { class: "quiet small" }, "a consequence, not the cause"),
    faults.map((fault) => h("details", {}, h("summary", { class: "break" }, `rank ${fault.rank}${fault.evidence ? `: ${fault.evidence.slice(0, 120)}` : ""}`), h("pre", { tabindex: "0" }, fault.evidence.slice(-TAIL)))));
}

function links(incident) {
  return card("Links", h("span", { class: "quiet small" }, "counters that grew from a minute before the incident until its end"),
    table(["Node", "Link", "Counter", "#Growth", "#Total"], incident.links.map((row) => h("tr", {},
      h("td", {}, `${row.node}${row.host ? ` (${row.host})` : ""}`),
      h("td", {}, row.link),
      h("td", { title: COUNTERS[row.counter] ?? "" }, row.counter, COUNTERS[row.counter] ? h("span", { class: "quiet small" }, ` ${COUNTERS[row.counter]}`) : ""),
      h("td", { class: "number" }, `+${count(row.change)}`),
      h("td", { class: "number" }, count(row.total)))), `Counters of links in incident ${incident.incident}`));
}

function ranks(incident) {
  const isBehind = (rank, other) => rank.step < other.step || (rank.step === other.step && rank.collective < other.collective);
  const first = incident.ranks.reduce((ahead, rank) => (isBehind(ahead, rank) ? rank : ahead));
  const lost = new Set(incident.faults.filter((fault) => !fault.noticed).map((fault) => fault.rank));
  const behind = incident.ranks.filter((rank) => isBehind(rank, first)).length;
  const shown = incident.ranks.slice(0, 128);
  const rows = shown.map((rank) => h("tr", { class: lost.has(rank.rank) ? "mark" : "" },
    h("td", { class: "nowrap" }, `rank ${rank.rank}`),
    h("td", { class: "number" }, count(rank.step)),
    h("td", { class: "number" }, count(rank.collective)),
    h("td", {}, rank.waiting ? `inside collective ${count(rank.collective)}` : "computing"),
    h("td", { class: "number" }, `${rank.idleS.toFixed(1)} s`),
    h("td", { class: "wide" }, rank.stack ? h("details", {}, h("summary", {}, "stack"), h("pre", { tabindex: "0" }, rank.stack)) : "")));
  const stacks = incident.ranks.some((rank) => rank.stack);
  const note = `${behind ? plural(behind, "rank") + " behind the others" : "all ranks had entered the same collectives"}${shown.length < incident.ranks.length ? `; the first ${shown.length} are shown` : ""}`;
  return card("What the ranks did before", h("span", { class: "quiet small" }, note),
    stacks ? null : h("p", { class: "quiet small" }, "Stacks are recorded when ranks look stuck. Here none did, or its process was stopped and could not write them."),
    table(["Rank", "#Step", "#Collectives", "Last seen", "#Idle", "Stack"], rows, `Ranks before incident ${incident.incident}`));
}
