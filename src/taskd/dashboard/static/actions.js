// What the operator can order: asked for, then confirmed with the sentence that the journal keeps.
import { h, plain, replace } from "./dom.js";
import { order } from "./live.js";

const text = (name, label, value = "") => ({ name, label, value });
const pick = (name, label, options) => ({ name, label, options });
const ACTIONS = {
  profile: ["Record a profile", [pick("switch", "Recording", ["on", "off"])]],
  stress: ["Stress test", [text("nodes", "Nodes (names, or all)", "all"), pick("ops", "Tests", ["compute,p2p", "compute", "p2p"])]],
  nic: ["Switch links", [pick("to", "Interface", ["backup", "primary"]), text("ranks", "Ranks (or all)", "all")]],
  fault: ["Report a fault", [text("ranks", "Ranks"), pick("kind", "Kind", ["process", "communication", "memory"]), text("because", "What you observed")]],
  drain: ["Drain a node", [text("node", "Node rank"), text("because", "Reason")]],
};

export function actionsDialog(job) {
  const dialog = h("dialog", { "aria-labelledby": "action-title" });
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  choose(dialog, job, "profile");
  dialog.showModal();
}

function choose(dialog, job, action) {
  const [, fields] = ACTIONS[action];
  const select = h("select", { id: "action" }, Object.entries(ACTIONS).map(([name, [label]]) => h("option", { value: name, selected: name === action }, label)));
  select.addEventListener("change", () => choose(dialog, job, select.value));
  const inputs = fields.map((field) => {
    const id = `field-${field.name}`;
    const input = field.options ? h("select", { id, name: field.name }, field.options.map((value) => h("option", { value }, value))) : h("input", { id, name: field.name, value: field.value, autocomplete: "off" });
    return [h("label", { for: id }, field.label), input];
  });
  const problem = h("p", { class: "problem", role: "alert" });
  const form = h("form", { method: "dialog" },
    h("h2", { id: "action-title" }, "Actions on this job"),
    h("label", { for: "action" }, "Action"), select, inputs, problem,
    h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), h("button", { class: "primary", type: "submit" }, "Continue")));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const settings = Object.fromEntries(new FormData(form));
    try {
      const { confirm } = await order(job, action, settings);
      confirmation(dialog, job, action, settings, confirm);
    } catch (error) {
      problem.textContent = plain(error.message);
    }
  });
  replace(dialog, form);
}

function confirmation(dialog, job, action, settings, sentence) {
  const problem = h("p", { class: "problem", role: "alert" });
  const yes = h("button", { class: "danger", type: "button" }, "Yes, do it");
  yes.addEventListener("click", async () => {
    yes.disabled = true;
    try {
      const { answer } = await order(job, action, { ...settings, confirmed: true });
      finished(dialog, sentence, answer);
    } catch (error) {
      problem.textContent = plain(error.message);
      yes.disabled = false;
    }
  });
  replace(dialog, h("h2", { id: "action-title" }, "Are you sure?"),
    h("p", { class: "break" }, `In job ${job} this will `, h("strong", {}, sentence), ". Your name and this sentence are written to the journal."), problem,
    h("div", { class: "buttons" }, h("button", { type: "button", autofocus: true, onclick: () => dialog.close() }, "Cancel"), yes));
}

function finished(dialog, sentence, answer) {
  replace(dialog, h("h2", { id: "action-title" }, "Done"),
    h("p", { class: "break" }, `Ordered: ${sentence}.`), answer ? h("p", { class: "quiet break" }, answer) : "",
    h("div", { class: "buttons" }, h("button", { class: "primary", type: "button", autofocus: true, onclick: () => dialog.close() }, "Close")));
}
