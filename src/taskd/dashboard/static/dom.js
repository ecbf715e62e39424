// Builds elements. Text is always set as text, never as HTML: names and log lines may be hostile.

// Control characters except line ends, and those that reverse the direction of the text around them.
const UNSAFE = /[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

export function plain(text) {
  return String(text).replace(UNSAFE, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, name === "href" || name === "value" ? String(value) : plain(value));
  }
  element.append(...children.flat(4).filter((child) => child !== null && child !== undefined && child !== false).map((child) => (child instanceof Node ? child : plain(child))));
  return element;
}

// In a narrow window each row is a block in which every cell has its heading, except in tables of
// numbers: those scroll.
export function table(head, rows, label) {
  const stacks = !head.some((cell) => cell.startsWith("#"));
  for (const row of stacks ? rows : []) [...row.children].forEach((cell, at) => (cell.dataset.head = head[at]));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", { class: stacks ? "stacks" : null }, h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col", class: cell.startsWith("#") ? "number" : null }, cell.replace(/^#/, ""))))), h("tbody", {}, rows)));
}

export function card(title, end, ...children) {
  return h("section", { class: "card" }, title ? h("div", { class: "head" }, h("h2", {}, title), end ? h("div", { class: "end" }, end) : null) : null, ...children);
}

export function pill(text, tone) {
  return h("span", { class: `pill ${tone}` }, text);
}

export function facts(rows) {
  return h("dl", { class: "facts" }, rows.filter(([, value]) => value !== null && value !== "").map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export function titled(...parts) {
  document.title = plain([...parts, "TaskD"].join(" · "));
}

export function choice(label, options, current, choose) {
  const buttons = options.map(([value, text]) => h("button", { type: "button", "aria-pressed": value === current ? "true" : "false", onclick: () => {
    for (const button of buttons) button.setAttribute("aria-pressed", "false");
    buttons[options.findIndex(([other]) => other === value)].setAttribute("aria-pressed", "true");
    choose(value);
  } }, text));
  return h("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}

// The focus and scrolled tables stay where they are.
export function replace(parent, ...children) {
  const focused = parent.contains(document.activeElement) ? placeOf(parent, document.activeElement) : null;
  const scrolled = [...parent.querySelectorAll(".scroll")].map((region) => [placeOf(parent, region), region.scrollLeft]);
  parent.replaceChildren(...children.flat(4).filter(Boolean));
  for (const [find, left] of scrolled) find()?.scrollTo({ left });
  focused?.()?.focus({ preventScroll: true });
}

// Draws again only what has changed: a selection stays.
export function redraw(parent, data, build) {
  const key = JSON.stringify(data);
  if (parent.drawn === key) return;
  parent.drawn = key;
  replace(parent, build());
}

// The same element after it was drawn again: the link to the same place, the region of the same
// name, or the nth of its kind.
function placeOf(parent, element) {
  const alike = (other) => other.localName === element.localName
    && ["href", "aria-label"].every((name) => other.getAttribute(name) === element.getAttribute(name));
  const at = [...parent.querySelectorAll("*")].filter(alike).indexOf(element);
  return () => [...parent.querySelectorAll("*")].filter(alike)[at];
}
