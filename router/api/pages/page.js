// Starts the page: the API key, the playground, and the live view, which polls the server while the page is visible.

import { get, key } from "./api.js";
import { showDecisions, showScaling } from "./decisions.js";
import { drawDiagram, sendDots } from "./diagram.js";
import { byId, tell } from "./dom.js";
import { startPlayground } from "./playground.js";
import { showLinks, showUnderWay, showWorkers } from "./workers.js";

const REMEMBERED_MS = 10_000;

const roleOf = (id) => id.replace(/-\d+$/, "");

/** The differences between successive answers of the server: lost workers, workers' speeds, new placements. */
class Watch {
  #known = new Map();
  #decided = null;

  /** Return the state to show, from the answers of `/cluster`, `/workers`, `/requests` and `/decisions`. */
  update(cluster, { workers }, requests, { decisions, scaling }) {
    const now = performance.now();
    const costs = new Map(cluster.workers.map((worker) => [worker.id, worker.costs]));
    const present = workers.map((worker) => this.#see(worker, costs.get(worker.id) ?? {}, now));
    const ids = new Set(present.map((worker) => worker.id));
    return {
      workers: [...present, ...this.#away(ids, cluster.awaited, now)].sort(byRole),
      links: linksOf(cluster, workers),
      stages: requests.stages,
      requests: requests.requests,
      decisions,
      scaling,
      fresh: this.#fresh(decisions),
    };
  }

  #see(worker, costs, now) {
    const before = this.#known.get(worker.id);
    const computed = worker.counters.computed_tokens_total ?? 0;
    const same = before?.incarnation === worker.incarnation && now > before.at;
    const speed = same ? Math.max(0, computed - before.computed) / ((now - before.at) / 1000) : 0;
    const { incarnation, role } = worker;
    this.#known.set(worker.id, { incarnation, role, computed, at: now });
    const running = worker.num_running + (worker.counters.draft_requests_open ?? 0);
    return { ...worker, costs, state: worker.lifecycle, speed, running };
  }

  /** Return workers that are starting, and workers that left within `REMEMBERED_MS`. */
  #away(present, awaited, now) {
    const found = awaited.filter((id) => !present.has(id)).map((id) => ({ id, state: "returning" }));
    for (const [id, { at }] of this.#known) {
      if (present.has(id) || awaited.includes(id)) continue;
      if (now - at < REMEMBERED_MS) found.push({ id, state: "gone" });
      else this.#known.delete(id);
    }
    return found.map((worker) => ({ ...worker, role: this.#known.get(worker.id)?.role ?? roleOf(worker.id) }));
  }

  /** Return the placements since the last update, the oldest first. */
  #fresh(decisions) {
    const before = this.#decided;
    this.#decided = new Set(decisions.map((decision) => decision.request_id));
    return before ? decisions.filter((decision) => !before.has(decision.request_id)).reverse() : [];
  }
}

const ROLES = ["prefill", "decode"];
const rank = (role) => (ROLES.includes(role) ? ROLES.indexOf(role) : ROLES.length);

function byRole(one, other) {
  return rank(one.role) - rank(other.role) || one.role.localeCompare(other.role)
    || one.id.localeCompare(other.id, "en", { numeric: true });
}

/** Return each pair's transport, with its speed once it has moved data. */
function linksOf(cluster, workers) {
  const links = new Map();
  const add = (from, to, facts) => {
    const known = links.get(`${from} ${to}`) ?? { from, to, moved: 0, refused: [] };
    links.set(`${from} ${to}`, { ...known, ...facts });
  };
  for (const { id, transports, pairs } of workers) {
    for (const [peer, transport] of Object.entries(transports)) {
      const refused = pairs.filter((pair) => pair.refused && ["", peer].includes(pair.peer));
      add(id, peer, { transport, refused });
    }
    for (const { peer, in_use: used, counters } of pairs) {
      if (used) add(id, peer, { moved: counters?.kv_transfer_bytes_total ?? 0 });
    }
  }
  for (const link of cluster.links) add(link.from, link.to, link);
  return [...links.values()];
}

const INTERVAL_MS = 1000;
const MAX_INTERVAL_MS = 5000;
const DECISIONS = 50;

const watch = new Watch();
let timer = 0;
let failures = 0;
let isLooking = false;
let hasSeen = false;

/** Poll now, then repeatedly. */
async function look() {
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
    if (error.status === 401) return onNoKey();
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
document.addEventListener("visibilitychange", () => document.hidden || look());
look();
