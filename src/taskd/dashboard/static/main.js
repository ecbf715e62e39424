// Chooses the page by the address, and draws the bar at the top.
import { actionsDialog } from "./actions.js";
import { card, h, pill, plain, redraw, replace, table, titled } from "./dom.js";
import { count, pace } from "./format.js";
import { incidentView } from "./incident.js";
import { jobPage } from "./job.js";
import { get, jobUrl, signOut, whoAmI } from "./live.js";
import { nodesPage } from "./nodes.js";

const main = document.getElementById("main");
const said = document.getElementById("said");
let leave = () => {};
let visits = 0; // of pages: an answer that comes after the next click is not shown

async function show(first) {
  leave();
  leave = () => {};
  visits += 1;
  const session = await whoAmI();
  const parts = location.pathname.split("/").filter(Boolean);
  const job = parts[0] === "jobs" ? decodeURIComponent(decodeURIComponent(parts[1])) : "";
  bar(session, job, parts[2]);
  if (!job) await jobsPage();
  else if (parts[2] === "nodes") leave = nodesPage(job, main, failed);
  else if (parts[2] === "incidents") await incidentPage(job, parts[3]);
  else leave = jobPage(job, main, say, failed);
  if (!first) main.focus();
}

function bar(session, job, page) {
  const link = (href, text, current) => h("a", { href, "aria-current": current ? "page" : null }, text);
  replace(document.getElementById("top"), h("div", { class: "bar" },
    h("a", { href: "/", class: "brand", "aria-label": "TaskD, all jobs" }, "TaskD"),
    job ? h("span", { class: "where", title: job }, job) : null,
    job ? h("nav", { "aria-label": "Pages of this job" }, link(jobUrl(job), "Job", page === undefined), link(`${jobUrl(job)}/nodes`, "Nodes", page === "nodes")) : null,
    h("div", { class: "end" },
      job && session.operator ? h("button", { type: "button", onclick: () => actionsDialog(job) }, "Actions") : null,
      h("span", { class: "who" }, session.operator ? session.who : `${session.who} · read only`),
      h("button", { class: "plain", type: "button", onclick: signOut }, "Sign out"))));
}

async function jobsPage() {
  const visit = visits;
  titled("Jobs");
  const { jobs } = await get("/jobs");
  if (visit !== visits) return;
  if (jobs.length === 1) return go(jobUrl(jobs[0].job), true);
  const list = h("div", {});
  replace(main, h("h1", {}, "Jobs"), list);
  redraw(list, jobs, () => jobTable(jobs));
  const again = setInterval(() => get("/jobs").then((data) => redraw(list, data.jobs, () => jobTable(data.jobs))).catch(() => {}), 2000);
  leave = () => clearInterval(again);
}

function jobTable(jobs) {
  const rows = jobs.map((job) => h("tr", {},
    h("td", { class: "wide" }, h("a", { href: jobUrl(job.job) }, job.name || job.job)),
    h("td", {}, pill(job.health, job.health)),
    h("td", { class: "number" }, count(job.step)),
    h("td", { class: "number" }, pace(job.stepsPerS)),
    h("td", { class: "number" }, count(job.world)),
    h("td", { class: "number" }, count(job.incident)),
    h("td", { class: "wide quiet" }, job.because)));
  return card("", null, jobs.length ? table(["Job", "Health", "#Step", "#Steps/s", "#Ranks", "#Incidents", "Because"], rows, "Jobs") : h("p", {}, "This server has no jobs."));
}

async function incidentPage(job, number) {
  const visit = visits;
  titled(`Incident ${number}`, job);
  const back = h("a", { href: jobUrl(job) }, "back to the job");
  const body = h("div", {});
  const load = async () => {
    const incident = await get(`${jobUrl(job)}/incidents/${Number(number)}`);
    redraw(body, incident, () => incidentView(incident, back));
    return incident.open;
  };
  const open = await load();
  if (visit !== visits) return;
  replace(main, body);
  if (!open) return;
  const again = setInterval(() => load().then((open) => open || clearInterval(again)).catch(() => {}), 1000);
  leave = () => clearInterval(again);
}

function say(text) {
  said.textContent = plain(text);
}

function failed(error) {
  replace(main, h("section", { class: "card hero unknown" }, h("h1", {}, h("span", { class: "dot" }), "This cannot be shown"), h("p", { class: "sub break" }, error.message), h("p", {}, h("a", { href: "/" }, "All jobs"))));
}

function go(path, replaces) {
  history[replaces ? "replaceState" : "pushState"]({}, "", path);
  return show(replaces).catch(failed);
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='/']");
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
  event.preventDefault();
  go(link.getAttribute("href"));
});
addEventListener("popstate", () => show(false).catch(failed));
show(true).catch(failed);
