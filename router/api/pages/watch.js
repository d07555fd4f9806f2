// Compares the server's successive answers: lost workers, workers' speeds, new placements.

const REMEMBERED_MS = 10_000;

const roleOf = (id) => id.replace(/-\d+$/, "");

export class Watch {
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

  /** Return workers that are being started, and workers that were there a moment ago. */
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
