// What a page lacks for people who see badly or use a screen reader, as a list of sentences.
() => {
  const parse = (text) => {
    const numbers = text.match(/[\d.]+/g).map(Number);
    return [numbers[0], numbers[1], numbers[2], numbers[3] ?? 1];
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour[3] > 0.99) return colour;
    }
    return [255, 255, 255, 1];
  };
  const problems = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim();
    const element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility() || element.closest(".hidden, .skip")) continue;
    const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) problems.push(`contrast of ${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  const named = "button, a[href], input, select, canvas, [role=img], [role=region], dialog";
  for (const element of document.querySelectorAll(named)) {
    const name = element.textContent.trim() || element.getAttribute("aria-label")
      || element.getAttribute("aria-labelledby") || element.labels?.length;
    if (element.closest("[role=img][aria-label]")) continue;
    if (element.checkVisibility() && !name) problems.push(`no name: ${element.outerHTML.slice(0, 80)}`);
  }
  if (document.documentElement.lang !== "en") problems.push("no language");
  if (!document.title) problems.push("no title");
  if (document.querySelectorAll("h1").length !== 1) problems.push("not exactly one h1");
  return problems;
}
