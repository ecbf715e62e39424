// Numbers and times for people.

export function count(value) {
  return Number(value).toLocaleString("en-US");
}

export function duration(ms) {
  if (ms === null || ms === undefined || !Number.isFinite(ms)) return "–";
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 120000) return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
  if (ms < 7200000) return `${Math.round(ms / 60000)} min`;
  if (ms < 172800000) return `${(ms / 3600000).toFixed(1)} h`;
  return `${Math.round(ms / 86400000)} days`;
}

export function clock(unixMs) {
  return new Date(unixMs).toLocaleTimeString("en-GB");
}

export function moment(unixMs) {
  const at = new Date(unixMs);
  const today = new Date().toDateString() === at.toDateString();
  return today ? clock(unixMs) : `${at.toLocaleDateString("en-CA")} ${clock(unixMs)}`;
}

// A long time, without more digits than a person needs.
export function span(ms) {
  const seconds = Math.round(Math.max(0, ms) / 1000);
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 10) return `${minutes} min ${seconds % 60} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days ${hours % 24} h`;
}

export function ago(unixMs, now = Date.now()) {
  return now - unixMs < 1500 ? "just now" : `${span(now - unixMs)} ago`;
}

export function pace(perS) {
  if (!perS) return "–";
  return perS >= 100 ? count(Math.round(perS)) : perS.toFixed(perS < 1 ? 3 : 2);
}

export function percent(share) {
  return share ? `${(100 * share).toFixed(1)} %` : "–";
}

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}
