// The report: the same views as on the page, from the data inside the file.
import { card, h, pill, replace, table } from "./dom.js";
import { count, duration, moment, plural } from "./format.js";
import { incidentView, resultOf, toneOf } from "./incident.js";
import { notesOf } from "./notes.js";

function reportView(data) {
  const faults = data.incidents.filter((incident) => incident.kind === "fault");
  const lost = faults.reduce((sum, incident) => sum + incident.tookMs, 0);
  const bad = faults.some((incident) => incident.outcome === "ended");
  const span = data.endedUnixMs - data.beganUnixMs;
  const worst = data.nodes.filter((node) => node.incidents && node.node >= 0).slice(0, 3);
  const figures = [
    ["incidents", count(faults.length)],
    ["lost in them", duration(lost)],
    ["longest", duration(Math.max(0, ...faults.map((incident) => incident.tookMs)))],
    ["recorded", duration(span)],
    ["most on", worst.length ? `node ${worst[0].node}` : "–"],
  ];
  const rows = data.incidents.map((incident) => h("tr", {},
    h("td", { class: "nowrap" }, h("a", { href: `#incident-${incident.incident}` }, `${incident.incident}`)),
    h("td", { class: "nowrap" }, moment(incident.beganUnixMs)),
    h("td", { class: "wide" }, incident.title),
    h("td", { class: "nowrap" }, incident.strategy),
    h("td", { class: "nowrap" }, pill(resultOf(incident), toneOf(incident)))));
  const open = data.incidents.length <= 3;
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  return [
    h("section", { class: `card hero ${bad ? "failed" : faults.length ? "done" : "still"}` },
      h("p", { class: "quiet small" }, `TaskD ${data.version} · written ${data.written} · the times below are those of ${zone}`),
      h("h1", {}, h("span", { class: "dot", "aria-hidden": "true" }), `${data.job}: ${faults.length ? plural(faults.length, "incident") : "no incidents"}`),
      h("p", { class: "sub break" }, data.live ? data.live.headline : data.because),
      h("dl", { class: "figures" }, figures.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      data.problem ? h("p", { class: "alert failed" }, data.problem) : null),
    data.incidents.length ? card("Incidents", null, table(["Incident", "Began", "What happened", "Strategy", "Result"], rows, "Incidents")) : null,
    data.notes.length ? notesOf(data.notes) : null,
    ...data.incidents.map((incident) => h("details", { class: "incident", id: `incident-${incident.incident}`, open },
      h("summary", {}, `Incident ${incident.incident}: ${incident.title}`), incidentView(incident, null, "h2"))),
  ];
}

replace(document.getElementById("main"), reportView(JSON.parse(document.getElementById("data").textContent)));
function openTarget() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (target) { target.open = true; target.scrollIntoView(); }
}
addEventListener("hashchange", openTarget);
openTarget();
