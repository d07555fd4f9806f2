// The live view: polls the server once a second while the page is visible, and updates all parts.

import { get } from "./api.js";
import { drawDiagram, sendDots } from "./diagram.js";
import { byId, tell } from "./dom.js";
import { showDecisions } from "./decisions.js";
import { showScaling } from "./scaling.js";
import { Watch } from "./watch.js";
import { showLinks, showUnderWay, showWorkers } from "./workers.js";

const INTERVAL_MS = 1000;
const MAX_INTERVAL_MS = 5000;
const DECISIONS = 50;

const watch = new Watch();
let timer = 0;
let failures = 0;
let isLooking = false;
let hasSeen = false;
let onNoKey;

export function startLive(noKey) {
  onNoKey = noKey;
  document.addEventListener("visibilitychange", () => document.hidden || look());
  look();
}

/** Poll now, and from now on repeatedly. */
export async function look() {
  clearTimeout(timer);
  if (isLooking) return;
  isLooking = true;
  try {
    const paths = ["/cluster", "/workers", "/requests?limit=1000", `/decisions?limit=${DECISIONS}`];
    show(watch.update(...(await Promise.all(paths.map(get)))));
    failures = 0;
    hasSeen = true;
    fail("");
  } catch (error) {
    failures += 1;
    fail(error.message);
    if (error.status === 401) return onNoKey(error.message);
  } finally {
    isLooking = false;
  }
  const pause = Math.min(INTERVAL_MS * Math.max(1, failures), MAX_INTERVAL_MS);
  if (!document.hidden) timer = setTimeout(look, pause);
}

function show(seen) {
  drawDiagram(seen);
  showWorkers(seen);
  showUnderWay(seen);
  showLinks(seen);
  showDecisions(seen.decisions);
  showScaling(seen.scaling);
  sendDots(seen);
  const ready = seen.workers.filter((worker) => worker.state === "ready").length;
  health(ready && ready === seen.workers.length ? "good" : "bad", `${ready} of ${seen.workers.length} workers ready`);
}

function fail(message) {
  const rest = hasSeen ? " What is shown below is from before." : "";
  tell(byId("stale"), message && message + rest);
  byId("cluster").classList.toggle("stale", Boolean(message));
  if (message) health("bad", message);
}

function health(state, text) {
  const element = byId("health");
  element.dataset.state = state;
  if (element.textContent !== text) element.textContent = text;
}
