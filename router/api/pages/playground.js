// The playground: sends a prompt, streams the answer with its drafted text tinted, and shows its stages' times.

import { events, request } from "./api.js";
import { byId, count, html, percent, plural, route, seconds, tell } from "./dom.js";
import { SAMPLES } from "./samples.js";

const form = byId("ask");
const prompt = byId("prompt");
const output = byId("output");
const samples = document.querySelectorAll("[data-sample]");

const WAITING = "Waiting for the first token …";
const WRITING = "The answer is being written …";

/** The messages of the chat so far. */
let chat = [];
/** Aborts the running request; null if none runs. */
let running = null;

export function startPlayground(onNoKey) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    tell(byId("about"), "");
    ask(onNoKey);
  });
  for (const button of samples) {
    button.addEventListener("click", () => {
      const sample = SAMPLES[button.dataset.sample];
      fill(sample);
      if (form.reportValidity()) ask(onNoKey, sample.fields?.());
    });
  }
  form.addEventListener("change", (event) => event.target.name === "kind" && changeKind());
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
}

/** Whether a chat is chosen. Without a chat template there is no choice. */
const isChat = () => form.elements.kind?.value === "chat";

function changeKind() {
  byId("prompt-label").textContent = isChat() ? "Your message" : "Text to continue";
  prompt.value = isChat() ? "" : "def read_file(path):\n";
  form.elements.schema.value = "";
  clear();
}

function fill({ prompt: text, about, schema, max_tokens }) {
  if (form.elements.kind) form.elements.kind.value = "completion";
  changeKind();
  prompt.value = text;
  form.elements.max_tokens.value = max_tokens;
  form.elements.schema.value = schema ? JSON.stringify(schema) : "";
  tell(byId("about"), about);
}

function clear() {
  running?.abort();
  chat = [];
  output.replaceChildren();
  byId("stages").replaceChildren();
  byId("facts").textContent = "";
  byId("legend").hidden = true;
  tell(byId("about"), "");
  tell(byId("problem"), "");
}

/** Send the form's request, with the `further` fields in addition. */
async function ask(onNoKey, further = {}) {
  const text = prompt.value;
  const talk = isChat();
  let body;
  try {
    body = { ...parameters(), ...further, stream: true, return_timing: true };
  } catch (error) {
    return tell(byId("problem"), `The JSON schema is not JSON: ${error.message}`);
  }
  if (talk) body.messages = [...chat, { role: "user", content: text }];
  else body.prompt = text;
  const answer = newAnswer(talk, text);
  const stop = begin();
  try {
    const path = talk ? "/v1/chat/completions" : "/v1/completions";
    for await (const event of events(await request(path, { body, signal: stop.signal }))) {
      for (const choice of event.choices) addSpans(answer, choice.spans ?? []);
      if (event.timing) finish(event.timing);
    }
  } catch (error) {
    if (error.name === "AbortError") byId("facts").textContent = "Stopped.";
    else tell(byId("problem"), error.message);
    if (error.status === 401) onNoKey(error.message);
    if (!answer.textContent) withdraw(answer.closest("article"));
  } finally {
    if (talk && answer.isConnected) remember(body.messages, answer, text);
    end(stop);
  }
}

/** Continue the chat with an answer, also one that was stopped: the model is told what the page shows. */
function remember(messages, answer, text) {
  chat = [...messages, { role: "assistant", content: answer.textContent }];
  if (prompt.value === text) prompt.value = ""; // else the next message is being typed already
}

function begin() {
  running = new AbortController();
  output.setAttribute("aria-busy", "true");
  setBusy(true);
  byId("facts").textContent = WAITING;
  byId("stages").replaceChildren();
  byId("legend").hidden = true;
  tell(byId("problem"), "");
  return running;
}

function setBusy(busy) {
  for (const button of [byId("go"), ...samples]) button.disabled = busy;
  byId("stop").disabled = !busy;
}

function end(stop) {
  if (running !== stop) return;
  running = null;
  output.setAttribute("aria-busy", "false");
  const hadFocus = document.activeElement === byId("stop");
  setBusy(false);
  if (hadFocus) byId("go").focus();
  if ([WAITING, WRITING].includes(byId("facts").textContent)) byId("facts").textContent = "";
}

/** Return the request's fields; the server decides the empty ones. Throws for a schema that is not JSON. */
function parameters() {
  const { max_tokens, temperature, top_p, seed, stop, schema, drafts } = form.elements;
  const fields = {
    max_tokens: max_tokens.valueAsNumber,
    temperature: temperature.valueAsNumber,
    top_p: top_p.valueAsNumber,
  };
  if (seed.value) fields.seed = seed.valueAsNumber;
  if (stop.value) fields.stop = stop.value;
  if (schema.value.trim()) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema.value) } };
  }
  if (!drafts.checked) fields.speculative = { enabled: false };
  return fields;
}

/** Append the prompt and an empty answer to the output, as text or as a chat's turns. Return the answer's element. */
function newAnswer(talk, text) {
  const answer = html("span", { class: "answer" });
  const given = html("span", { class: "given" }, text);
  if (talk) output.append(turn("You", given), turn("Model", answer));
  else output.replaceChildren(html("article", {}, given, answer));
  output.scrollTop = output.scrollHeight;
  return answer;
}

/** Remove an answer that got no text. Its prompt is still in the form. */
function withdraw(article) {
  if (isChat()) article.previousElementSibling?.remove();
  article.remove();
}

const turn = (who, text) => html("article", {}, html("h3", {}, who), text);

function addSpans(answer, spans) {
  const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
  if (spans.length && byId("facts").textContent === WAITING) byId("facts").textContent = WRITING;
  for (const { text, drafted } of spans) {
    if (drafted) byId("legend").hidden = false;
    const tag = drafted ? "MARK" : "SPAN";
    let last = answer.lastElementChild;
    if (last?.tagName !== tag) answer.append((last = html(tag, { class: drafted ? "drafted" : undefined })));
    last.append(text);
  }
  if (atEnd) output.scrollTop = output.scrollHeight;
}

function finish(timing) {
  const [choice] = timing.choices;
  const decoding = choice.total_s - choice.ttft_s;
  const whole = `${plural(choice.tokens, "token")} in ${seconds(timing.total_s)}`;
  const said = [whole, `the first after ${seconds(choice.ttft_s)}`];
  if (choice.tokens > 1 && decoding > 0) said.push(`then ${count((choice.tokens - 1) / decoding)} a second`);
  if (choice.drafted_tokens) {
    const rate = percent(choice.accepted_tokens / choice.drafted_tokens);
    said.push(`${count(choice.accepted_tokens)} of ${count(choice.drafted_tokens)} drafted tokens accepted (${rate})`);
  }
  said.push(`by ${route(choice.workers)}` + (choice.transfer?.transport ? ` over ${choice.transfer.transport}` : ""));
  byId("facts").textContent = `${said.join("; ")}.`;
  byId("stages").replaceChildren(stagesTable(timing));
}

/** Return the table of a timing record (`"return_timing": true`) of an answer with one choice. */
function stagesTable(timing) {
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

/** Return a row whose bar shows the share of the answer's tokens that are accepted drafts, not a time. */
function draftsRow({ accepted_tokens: accepted, drafted_tokens: drafted, tokens, total_s: total }) {
  if (!drafted) return { name: "Drafts", bars: [], told: "none" };
  const bars = [[0, (accepted / Math.max(tokens, 1)) * total]];
  return { name: "Drafts", kind: "drafts", bars, told: `${count(accepted)} (${percent(accepted / drafted)})` };
}
