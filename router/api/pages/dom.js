// Makes elements from plain values, and formats figures for people.
// Strings become text nodes, so that a string from the server is never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export const html = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);

export const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Show a message, or hide it if `text` is empty. */
export function tell(element, text) {
  if (element.textContent !== text) element.textContent = text;
  element.hidden = !text;
}

const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

export const times = (ratio) => number.format(ratio);

export const percent = (share) => `${whole.format(share * 100)} %`;

export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** Format a duration from microseconds to minutes. */
export function seconds(value) {
  if (value >= 1) return `${number.format(value)} s`;
  return value >= 1e-3 ? `${number.format(value * 1e3)} ms` : `${number.format(value * 1e6)} µs`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, value >= 1 ? Math.floor(Math.log10(value) / 3) : 0);
  return `${number.format(value / 1000 ** power)} ${units[power]}`;
}

/** Return "prefill-0 → decode-1", or the only worker. */
export const route = (workers) => [workers.prefill, workers.decode].filter(Boolean).join(" → ");
