// Starts the page: the API key, the playground, and the live view.

import { key } from "./api.js";
import { byId } from "./dom.js";
import { look, startLive } from "./live.js";
import { startPlayground } from "./playground.js";

const form = byId("key");
const open = byId("key-open");

function showKey(shown) {
  form.hidden = !shown;
  open.setAttribute("aria-expanded", String(shown));
  if (shown) byId("key-text").focus();
}

function useKey(text) {
  key.set(text);
  byId("key-text").value = "";
  showKey(false);
  open.focus();
  look();
}

open.addEventListener("click", () => showKey(form.hidden));
form.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key-text").value.trim());
});
byId("key-forget").addEventListener("click", () => useKey(""));

const onNoKey = () => form.hidden && showKey(true);
startPlayground(onNoKey);
startLive(onNoKey);
