// Shows the latest placements and their predicted costs, and --autoscale's changes of workers, in sentences.

import { byId, count, html, percent, plural, route, seconds, times } from "./dom.js";

const SHOWN = 6;
const SHOWN_CHANGES = 5;
const PARTS = {
  queue_s: "waiting behind other prompts",
  fetch_s: "fetching cached KV",
  prefill_s: "prefill",
  handoff_s: "hand-off",
  room_s: "waiting for KV room",
  decode_s: "decode",
  coming_s: "later prompts, if they are not split",
  delay_s: "delay of others by its prefill",
  slowdown_s: "delay of others by its decode",
};

const items = new Map();

export function showDecisions(decisions) {
  const list = byId("decisions");
  const latest = decisions.slice(0, SHOWN);
  const ids = new Set(latest.map((decision) => decision.request_id));
  for (const [id, item] of items) {
    if (ids.has(id)) continue;
    item.element.remove();
    items.delete(id);
  }
  latest.toReversed().forEach((decision) => {
    const item = items.get(decision.request_id) ?? newItem(decision, list);
    item.outcome.textContent = `${drafting(decision)} ${outcome(decision)}`;
  });
  if (!decisions.length) list.replaceChildren(html("li", { class: "quiet" }, "None yet."));
}

/** Add an item. It is not replaced later, so that an opened comparison stays open; only its outcome changes. */
function newItem(decision, list) {
  if (!items.size) list.replaceChildren();
  const result = html("span");
  const element = html("li", {},
    html("p", {}, clock(decision.at), " ",
      html("b", {}, where(decision.chosen.workers)), ` for ${plural(decision.num_tokens, "token")}. `,
      why(decision), " ", result),
    comparison(decision));
  const item = { element, outcome: result };
  items.set(decision.request_id, item);
  list.prepend(element);
  return item;
}

function clock(at) {
  const time = new Date(at * 1000);
  return html("time", { class: "quiet", datetime: time.toISOString() }, time.toLocaleTimeString());
}

const where = (workers) => (workers.prefill ? `Split: ${route(workers)}` : `Whole: ${workers.decode}`);

function why({ chosen, alternatives, cached_tokens: cached, missing, session, asked_to_split: split, num_tokens: tokens }) {
  const said = [];
  if (split !== null) said.push(`It asks ${split ? "to be split" : "for one worker"}.`);
  if (missing) said.push(`No ${missing} worker was there.`);
  const begins = chosen.workers.prefill ?? chosen.workers.decode;
  if (cached[begins]) said.push(`${begins} has the KV of ${count(cached[begins])} of ${count(tokens)} tokens.`);
  if (chosen.prefix) said.push(`It fetches cached KV from ${chosen.prefix}.`);
  if (session) said.push("Its session was there before.");
  const { predicted } = chosen;
  if (!predicted) return said.join(" ");
  said.push(`Expected to cost ${seconds(predicted.cost_s)}: ${mainParts(predicted.parts)}.`);
  const next = alternatives.filter((option) => option.predicted)
    .sort((one, other) => one.predicted.cost_s - other.predicted.cost_s)[0];
  if (next) said.push(`${compared(next, predicted.cost_s)}.`);
  return said.join(" ");
}

function compared(option, cost) {
  const ratio = option.predicted.cost_s / cost;
  const percents = `${percent(Math.abs(ratio - 1))} ${ratio > 1 ? "more" : "less"}`;
  const how = ratio >= 2 ? `${times(ratio)} times as much` : Math.abs(ratio - 1) < 0.005 ? "the same" : percents;
  return `${where(option.workers)} would cost ${how}`;
}

const mainParts = (parts) =>
  Object.entries(parts).filter(([, value]) => value > 0).sort(([, one], [, other]) => other - one).slice(0, 3)
    .map(([name, value]) => `${PARTS[name] ?? name} ${seconds(value)}`).join(", ") || "nothing";

/** Tell which worker drafts, and the expected rate of the alternatives. */
function drafting({ drafts }) {
  if (!drafts) return "";
  const { chosen, alternatives, replans } = drafts;
  const rate = (option) => count(option.predicted.tokens_per_s);
  const others = alternatives.map((option) => `${rate(option)} if ${drafter(option)}`);
  const moved = replans ? ` Planned again ${plural(replans, "time")}.` : "";
  const instead = others.length ? ` (${others.join(", ")})` : "";
  return `Drafts: ${drafter(chosen)}, for ${rate(chosen)} tokens/s${instead}.${moved}`;
}

const drafter = ({ where: place, worker, method, max_tokens: most }) =>
  place === "none" ? "no worker drafts" : `${worker} drafts up to ${plural(most, "token")} by ${method}`;

function outcome({ observed, chosen }) {
  if (observed.ttft_s === null) return "It has no token yet.";
  const expected = chosen.predicted ? ` (${seconds(chosen.predicted.ttft_s)} expected)` : "";
  const rest = observed.tpot_s === null ? "" : `, then ${seconds(observed.tpot_s)} a token`;
  return `Its first token took ${seconds(observed.ttft_s)}${expected}${rest}.`;
}

function comparison({ chosen, alternatives }) {
  const options = [chosen, ...alternatives].filter((option) => option.predicted);
  if (options.length < 2) return null;
  const head = ["Option", "Cost", "First token", "Each further"].map((name) => html("th", { scope: "col" }, name));
  const rows = options.map(({ workers, predicted }) =>
    html("tr", {}, html("td", {}, where(workers)),
      ...[predicted.cost_s, predicted.ttft_s, predicted.tpot_s].map((value) => html("td", {}, seconds(value)))));
  return html("details", {}, html("summary", {}, `${options.length} options compared`),
    html("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Options compared" },
      html("table", {}, html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...rows))));
}

/** Show the latest changes; hide the section if there are none. */
export function showScaling(events) {
  byId("scaling-part").hidden = !events.length;
  byId("scaling").replaceChildren(...events.slice(0, SHOWN_CHANGES).map(item));
}

function item({ at, targets, had, reasons, changes_role: change, failure }) {
  const changed = change
    ? [`One ${change.from} worker becomes a ${change.to} worker: ${reasons[change.to]}.`]
    : Object.entries(targets).map(([role, count]) =>
      `${plural(count, `${role} worker`)} instead of ${had[role]}: ${reasons[role]}.`);
  if (failure) changed.push(`That failed: ${failure}.`);
  return html("li", {}, clock(at), " ", changed.join(" "));
}
