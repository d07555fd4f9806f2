// Shows --autoscale's changes of the number of workers, in sentences.

import { byId, html } from "./dom.js";
import { plural } from "./words.js";

const SHOWN = 5;

/** Show the latest changes; hide the section if there are none. */
export function showScaling(events) {
  byId("scaling-part").hidden = !events.length;
  byId("scaling").replaceChildren(...events.slice(0, SHOWN).map(item));
}

function item({ at, targets, had, reasons, changes_role: change, failure }) {
  const time = new Date(at * 1000);
  const changed = change
    ? [`One ${change.from} worker becomes a ${change.to} worker: ${reasons[change.to]}.`]
    : Object.entries(targets).map(([role, count]) =>
      `${plural(count, `${role} worker`)} instead of ${had[role]}: ${reasons[role]}.`);
  if (failure) changed.push(`That failed: ${failure}.`);
  return html("li", {}, html("time", { class: "quiet", datetime: time.toISOString() }, time.toLocaleTimeString()), " ",
    changed.join(" "));
}
