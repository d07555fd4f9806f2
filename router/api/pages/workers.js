// Shows the workers, their links and the running requests, in words and figures.

import { byId, bytes, count, html, percent, plural, seconds } from "./dom.js";

const PROMPT = 512;

export function showWorkers({ workers }) {
  byId("workers").tBodies[0].replaceChildren(...workers.map(row));
}

function row(worker) {
  const cell = (label, ...content) => html("td", { "data-label": label }, ...content);
  const here = worker.counters !== undefined;
  const bad = !["ready", "draining"].includes(worker.state);
  return html("tr", { class: worker.role },
    html("th", { scope: "row" }, worker.id),
    cell("State", html("span", { class: bad && "bad" }, worker.state), here && bad ? silence(worker) : null),
    cell("Running", ...(here ? load(worker) : ["–"])),
    cell("KV used", ...(here ? room(worker) : ["–"])),
    cell("Speed", ...(here ? speed(worker) : ["–"])),
    cell("Drafts accepted", ...(here ? drafts(worker) : ["–"])));
}

const note = (text) => html("small", {}, text);

const silence = (worker) => note(`for ${seconds(worker.silent_s)}`);

const load = (worker) => [count(worker.running), note(`${count(worker.num_waiting)} waiting`)];

function room(worker) {
  const cached = worker.total_blocks ? worker.cached_blocks / worker.total_blocks : 0;
  return [percent(worker.kv_usage), note(`${percent(cached)} cached`)];
}

/** Return the worker's current rate, and its speed by its measured costs. */
function speed({ speed: now, role, costs }) {
  const chunk = costs.step_s + costs.chunk_s + PROMPT * (costs.token_s + (costs.attention_s * PROMPT) / 2);
  const step = costs.step_s + costs.row_s;
  const can = role === "prefill" ? `${PROMPT} tokens in ${seconds(chunk)}` : `a step in ${seconds(step)}`;
  return [now >= 1 ? `${count(now)} tokens/s` : "idle", note(can)];
}

/** Return the drafts since the worker's start: acceptance by source, and drafts for other workers. */
function drafts({ counters, speculation }) {
  const found = Object.entries(counters).flatMap(([name, drafted]) => {
    const method = name.match(/^spec_decode_num_draft_tokens_total\{method="(.*)"\}$/)?.[1];
    if (!method || !drafted) return [];
    const accepted = counters[`spec_decode_num_accepted_tokens_total{method="${method}"}`] ?? 0;
    const now = speculation?.methods?.find((each) => each.method === method);
    const depth = now?.num_requests ? `, ${count((now.num_tokens ?? 0) / now.num_requests)} a step now` : "";
    const source = method === "remote" ? "draft worker" : method;
    return [percent(accepted / drafted), note(`${source}: ${count(accepted)} of ${count(drafted)}${depth}`)];
  });
  const { drafted_tokens_total: drafted, drafted_tokens_wrong_total: wrong } = counters;
  if (drafted) found.push(`${percent(1 - wrong / drafted)} right`, note(`${count(drafted)} drafted for others`));
  return found.length ? found : ["–"];
}

export function showUnderWay({ stages }) {
  const names = { queue: "queued", prefill: "in prefill", transfer: "in transfer", decode: "decoding" };
  byId("under-way").replaceChildren(...Object.entries(stages).map(([stage, number]) =>
    html("li", { class: stage }, `${count(number)} ${names[stage] ?? stage}`)));
}

export function showLinks({ links }) {
  const none = [html("li", { class: "quiet" }, "No worker hands prompts over to another.")];
  byId("links").replaceChildren(...(links.length ? links.map(link) : none));
}

function link({ from, to, transport, bytes_per_s: speed, moved, refused }) {
  const facts = moved ? `${bytes(speed)}/s, ${bytes(moved)} moved` : "nothing moved yet";
  const why = refused.map((pair) => `not ${pair.transport}: ${pair.reason}`).join("; ");
  return html("li", {}, `${from} → ${to}: ${transport}, ${facts}`, why ? note(why) : null);
}

/** Return the diagram's line about a worker: its requests, or its state if it is not ready. */
export const atWork = (worker) =>
  worker.counters === undefined ? worker.state
    : worker.state !== "ready" ? worker.state
      : plural(worker.running + worker.num_waiting, "request");
