// The nodes of a job: which one keeps causing incidents, and what the loss of each would cost now.
import { card, h, pill, redraw, replace, table, titled } from "./dom.js";
import { count, moment, plural } from "./format.js";
import { get, jobUrl } from "./live.js";
import { notesOf } from "./notes.js";

const MOST = 300;

export function nodesPage(job, root, failed) {
  titled("Nodes", job);
  const body = h("div", {});
  replace(root, body);
  let stopped = false;
  async function load() {
    try {
      const data = await get(`${jobUrl(job)}/nodes`);
      if (!stopped) redraw(body, data, () => view(data));
    } catch (error) {
      if (!stopped) failed(error);
    }
  }

  function view(data) {
    const [worst] = data.nodes.filter((node) => node.incidents);
    const spread = worst && data.nodes[1]?.incidents === worst.incidents;
    const headline = worst && data.nodes.length === 1
      ? `The only node has had ${plural(data.incidents, "incident")}`
      : spread
      ? `${plural(data.incidents, "incident")}, on ${plural(data.nodes.filter((node) => node.incidents).length, "node")}`
      : worst
      ? `Node ${worst.node} has caused ${worst.incidents === data.incidents ? (data.incidents === 1 ? "the only incident" : `all ${count(data.incidents)} incidents`) : `${count(worst.incidents)} of ${plural(data.incidents, "incident")}`}`
      : "No node has caused an incident";
    const risky = data.nodes.filter((node) => node.severity === "bad" && !node.leader).length;
    const most = Math.max(1, ...data.nodes.map((node) => node.incidents));
    const rows = data.nodes.slice(0, MOST).map((node) => row(job, node, most));
    const left = data.nodes.length - rows.length;
    return [
      h("section", { class: `card hero ${data.incidents ? "slow" : "training"}` }, h("h1", {}, h("span", { class: "dot", "aria-hidden": "true" }), headline),
        h("p", { class: "sub" }, `${plural(data.nodes.length, "node")} · ${data.spares ? plural(data.spares, "spare") : "no spare"} · ${data.nodes.length === 1 ? "if it is lost, the job ends" : risky ? `the loss of ${plural(risky, "node")} would cost steps` : "the loss of any node except the manager's would cost no step"}`)),
      card("Nodes", null, table(["Node", "Health", "Ranks", "Incidents", "Its loss would cost now", "Last incidents"], rows, "Nodes"),
        left > 0 ? h("p", { class: "quiet small" }, `${count(left)} more nodes without incidents`) : null),
      shardsOf(data.shards),
      notesOf(data.notes),
    ];
  }

  load();
  const again = setInterval(load, 3000);
  return () => { stopped = true; clearInterval(again); };
}

function shardsOf(shards) {
  if (!shards.length) return null;
  const on = (nodes) => (nodes.length ? `${nodes.length > 1 ? "nodes" : "node"} ${nodes.slice(0, 12).join(", ")}${nodes.length > 12 ? ` and ${nodes.length - 12} more` : ""}` : "–");
  const rows = shards.map((shard) => {
    const safe = new Set([...shard.replicas, ...shard.copies]).size > 1;
    return h("tr", {},
      h("td", { class: "wide mono" }, shard.shard || "the whole state"),
      h("td", {}, on(shard.replicas)),
      h("td", {}, on(shard.copies)),
      h("td", { class: "nowrap" }, pill(safe ? "survives any node" : "on one node only", safe ? "training" : "slow")));
  });
  return card("Where the state is", h("span", { class: "quiet small" }, "replicas train; copies are kept in memory after each step"),
    table(["Shard", "Replicas on", "Copies on", "If a node is lost"], rows, "Shards"));
}

function row(job, node, most) {
  const tone = { good: "training", warn: "slow", bad: "failed" }[node.severity];
  const health = !node.present ? pill("lost", "failed") : node.problem ? pill(node.problem, "failed") : node.slow.length ? pill(`slow: rank ${node.slow[0].rank} (${node.slow[0].cause})`, "slow") : node.spare ? pill("spare", "still") : pill(phasesOf(node), node.phases.training === node.rankCount ? "training" : "slow");
  const bar = h("div", { class: "track" }, h("div", { class: node.incidents > 1 ? "took over" : "took" }));
  bar.firstChild.style.width = node.incidents ? `${(100 * node.incidents) / most}%` : "0";
  bar.firstChild.hidden = !node.incidents;
  const devices = node.devices.map((device) => `device ${device.device}: ${device.incidents}`).join(", ");
  return h("tr", {},
    h("td", {}, h("strong", {}, `${node.node}`), h("div", { class: "quiet small break" }, [node.host, node.leader ? "manager" : ""].filter(Boolean).join(" · "))),
    h("td", { class: "nowrap" }, health),
    h("td", { class: "nowrap" }, rankRange(node)),
    h("td", {}, h("div", { class: "lanes" }, h("span", {}, `${node.incidents}`), bar, ""), h("div", { class: "quiet small" }, devices)),
    h("td", { class: "wide" }, pill(tone === "training" ? "safe" : tone === "slow" ? "waits" : "at risk", tone), " ", h("span", { class: "small" }, node.loss), node.notCopied.length ? h("div", { class: "quiet small break" }, `only here: ${node.notCopied.join(", ")}`) : null),
    h("td", { class: "small" }, node.recent.map((one) => h("div", {}, h("a", { href: `${jobUrl(job)}/incidents/${one.incident}` }, `rank ${one.rank} ${one.cause}`), h("span", { class: "quiet" }, ` ${moment(one.atUnixMs)}`)))));
}

function phasesOf(node) {
  return Object.entries(node.phases).map(([phase, number]) => `${number} ${phase}`).join(", ") || "idle";
}

function rankRange(node) {
  if (!node.ranks.length) return "–";
  const [low, high] = [node.ranks[0], node.ranks.at(-1)];
  return low === high ? `${low}` : high - low + 1 === node.ranks.length ? `${low} to ${high}` : node.ranks.join(", ");
}
