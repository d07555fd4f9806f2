// Shows an answer's times: a row for each stage, with bars along the time axis, from its timing record.

import { html } from "./dom.js";
import { count, percent, seconds } from "./words.js";

/** Return the table of a timing record (`"return_timing": true`) of an answer with one choice. */
export function stagesTable(timing) {
  const total = timing.total_s;
  const rows = rowsOf(timing).map(({ name, kind, bars, told, point }) =>
    html("tr", {},
      html("th", { scope: "row" }, name),
      html("td", {}, html("div", { class: "track" }, ...bars.map((bar) => barOf(bar, total, kind, point)))),
      html("td", {}, told)));
  const caption = html("caption", {}, `Where ${seconds(total)} went`);
  return html("table", { class: "stages" }, caption, html("tbody", {}, ...rows));
}

function barOf([begin, length], total, kind, point) {
  const bar = html("i", { class: point ? "point" : kind });
  const at = Math.max(0, Math.min(1, begin / total));
  bar.style.left = `${at * 100}%`;
  if (!point) bar.style.width = `${Math.min(1 - at, Math.max(0, length / total)) * 100}%`;
  return bar;
}

/** Return the rows. A bar is [begin, length], in seconds from the request's arrival. */
function rowsOf(timing) {
  const [choice] = timing.choices;
  const { transfer } = choice;
  const answered = choice.total_s - choice.decode_s - choice.takeover_s;
  const placing = timing.prepare_s + choice.earlier_s + choice.queue_s;
  const arrived = answered + (transfer ? transfer.exposed_s : 0);
  const decoding = arrived + (transfer ? transfer.handoff_s : 0);
  const prefilling = answered - choice.prefill_s;
  const placed = placing + choice.placement_s;
  const spent = (name, kind, ...bars) => {
    const sum = bars.reduce((whole, [, length]) => whole + length, 0);
    return { name, kind, bars: bars.filter(([, length]) => length > 0), told: sum > 0 ? seconds(sum) : "none" };
  };
  const rows = [
    spent("Router", "", [0, timing.prepare_s], [placing, choice.placement_s]),
    spent("Queue", "", [placing - choice.queue_s, choice.queue_s], [placed, prefilling - placed]),
    spent("Prefill", "prefill", [prefilling, choice.prefill_s]),
    spent("Transfer", "transfer", [arrived - (transfer?.transfer_s ?? 0), transfer?.transfer_s ?? 0]),
    spent("Decode queue", "transfer", [decoding - choice.decode_queue_s, choice.decode_queue_s]),
    { name: "First token", bars: [[choice.ttft_s, 0]], point: true, told: seconds(choice.ttft_s) },
    spent("Decode", "decode", [choice.total_s - choice.decode_s, choice.decode_s]),
    draftsRow(choice),
  ];
  if (choice.earlier_s > 0) rows.splice(1, 0, spent("Lost workers", "", [timing.prepare_s, choice.earlier_s]));
  return rows;
}

/** Return a row whose bar is no time but the share of the answer's tokens that were drafted. */
function draftsRow({ accepted_tokens: accepted, drafted_tokens: drafted, tokens, total_s: total }) {
  if (!drafted) return { name: "Drafts", bars: [], told: "none" };
  const bars = [[0, (accepted / Math.max(tokens, 1)) * total]];
  return { name: "Drafts", kind: "drafts", bars, told: `${count(accepted)} (${percent(accepted / drafted)})` };
}
