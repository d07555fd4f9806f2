// The playground: sends a prompt, streams the answer with its drafted text tinted, and shows its stages' times.

import { events, request } from "./api.js";
import { byId, html, tell } from "./dom.js";
import { SAMPLES } from "./samples.js";
import { stagesTable } from "./stages.js";
import { count, percent, plural, route, seconds } from "./words.js";

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

/** Send the form's request, with `further` fields that the form does not have. */
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
    if (talk) chat = [...body.messages, { role: "assistant", content: answer.textContent }];
    if (talk) prompt.value = "";
  } catch (error) {
    if (error.name === "AbortError") byId("facts").textContent = "Stopped.";
    else tell(byId("problem"), error.message);
    if (error.status === 401) onNoKey(error.message);
    if (!answer.textContent) withdraw(answer.closest("article"));
  } finally {
    end(stop);
  }
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

/** Return the element for the answer's text. A completion follows its prompt, a chat's turns stand below each other. */
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
