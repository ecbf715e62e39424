// Reports about the health of ranks and devices, and what operators did.
import { card, h, pill, table } from "./dom.js";
import { moment } from "./format.js";

export function notesOf(notes) {
  const kinds = { slow: ["slow", "pace"], device: ["failed", "device"], action: ["still", "action"] };
  return card("Health reports and actions", null, notes.length
    ? table(["When", "Kind", "What"], notes.map((note) => h("tr", {},
      h("td", { class: "nowrap" }, moment(note.atUnixMs)),
      h("td", { class: "nowrap" }, pill(kinds[note.kind][1], kinds[note.kind][0])),
      h("td", { class: "wide" }, note.text))), "Health reports and actions")
    : h("p", { class: "quiet" }, "No rank was slow, no device was reported, and no operator did anything."));
}
