// Formats figures for people.

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
