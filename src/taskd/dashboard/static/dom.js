// Builds elements. Text is always set as text, never as HTML: names and log lines may be hostile.

export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, String(value));
  }
  element.append(...children.flat(4).filter((child) => child !== null && child !== undefined && child !== false).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

export function table(head, rows, label) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", {}, h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col", class: cell.startsWith("#") ? "number" : null }, cell.replace(/^#/, ""))))), h("tbody", {}, rows)));
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

export function choice(label, options, current, choose) {
  const buttons = options.map(([value, text]) => h("button", { type: "button", "aria-pressed": value === current ? "true" : "false", onclick: () => {
    for (const button of buttons) button.setAttribute("aria-pressed", "false");
    buttons[options.findIndex(([other]) => other === value)].setAttribute("aria-pressed", "true");
    choose(value);
  } }, text));
  return h("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}

export function replace(parent, ...children) {
  parent.replaceChildren(...children.flat(4).filter(Boolean));
}
