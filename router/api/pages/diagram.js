// Draws the cluster: the router, a column of workers for each role, and the traffic between them.

import { byId, bytes, count, svg } from "./dom.js";
import { atWork } from "./workers.js";

const NODE = { height: 50, gap: 12, narrow: 92, wide: 140 };
const LANE = 18;
const MAX_IN_COLUMN = 6;
const MAX_LABELS = 3;
const MAX_DOTS = 24;

const stillness = matchMedia("(prefers-reduced-motion: reduce)");
const dots = svg("g");
let nodes = new Map();
let lane = 0;

export function drawDiagram(seen) {
  const picture = byId("diagram");
  const width = Math.max(280, picture.clientWidth);
  const height = layOut(seen, columnsOf(seen.workers, width), width);
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.setAttribute("height", height);
  const flows = flowsOf(seen);
  picture.replaceChildren(...flows.map(line), ...labels(seen.links), dots, ...[...nodes.values()].map(node));
  const left = seen.workers.length - (nodes.size - 1);
  if (left) picture.append(svg("text", { class: "small", x: 0, y: height - 4 }, `${count(left)} more in the table`));
}

/** Return a column of workers for each role; roles without room for a column are appended to the last one. */
function columnsOf(workers, width) {
  const roles = [...new Set(workers.map((worker) => worker.role))];
  const room = Math.floor((width - 60) / (NODE.narrow + 24));
  const columns = [];
  for (const role of roles) {
    const members = workers.filter((worker) => worker.role === role);
    if (columns.length < Math.max(2, room)) columns.push(busiest(members));
    else columns.at(-1).push(...busiest(members));
  }
  return columns;
}

/** Return the workers that a column shows: the busiest ones. */
const busiest = (members) =>
  members.length <= MAX_IN_COLUMN ? members
    : [...members].sort((one, other) => (other.running ?? 0) - (one.running ?? 0)).slice(0, MAX_IN_COLUMN);

/** Set the positions in `nodes` and return the height of the diagram. */
function layOut({ stages }, columns, width) {
  const most = Math.max(1, ...columns.map((column) => column.length));
  const body = most * (NODE.height + NODE.gap) - NODE.gap;
  const router = Math.min(84, width * 0.2);
  const underWay = Object.values(stages).reduce((sum, number) => sum + number, 0);
  const space = columns.length ? (width - router) / columns.length : 0;
  const across = Math.min(NODE.wide, space - 26);
  lane = body + LANE / 2 + 2;
  nodes = new Map([["router", { id: "router", x: 0.5, y: body / 2 - 25, width: router, role: "", underWay }]]);
  columns.forEach((column, index) => {
    const top = (body - (column.length * (NODE.height + NODE.gap) - NODE.gap)) / 2;
    column.forEach((worker, place) => {
      const x = router + (index + 1) * space - across - 1;
      nodes.set(worker.id, { ...worker, x, y: top + place * (NODE.height + NODE.gap) + 0.5, width: across });
    });
  });
  return body + LANE + 2;
}

function node(worker) {
  const { id, x, y, width, role, kv_usage: used } = worker;
  const fit = Math.floor((width - 14) / 7);
  const away = role && worker.state !== "ready";
  const group = svg("g", { class: `${role} ${away ? "away" : ""}`, transform: `translate(${x} ${y})` },
    svg("title", {}, id),
    svg("rect", { class: "node", width, height: NODE.height, rx: 6 }),
    svg("text", { class: "name", x: 10, y: 18 }, id.length > fit ? `${id.slice(0, fit - 1)}…` : id));
  const doing = role ? atWork(worker) : `${count(worker.underWay)} now`;
  group.append(svg("text", { class: "small", x: 10, y: 32 }, doing));
  if (role) group.append(svg("rect", { class: "role", width: 3, height: NODE.height - 12, x: 0, y: 6 }));
  if (used !== undefined) {
    const room = width - 20;
    group.append(svg("rect", { class: "room", x: 10, y: 39, width: room, height: 4, rx: 2 }),
      svg("rect", { class: "used", x: 10, y: 39, width: room * Math.min(1, used), height: 4, rx: 2 }));
  }
  return group;
}

/** Return all lines, with the number of requests on each now. */
function flowsOf({ workers, links, requests }) {
  const flows = new Map();
  const add = (from, to, stage, number) => {
    const flow = flows.get(`${from}>${to}`) ?? { from, to, stage, number: 0 };
    flows.set(`${from}>${to}`, { ...flow, stage, number: flow.number + number });
  };
  for (const { id, role } of workers) if (["prefill", "decode"].includes(role)) add("router", id, role, 0);
  for (const { from, to } of links) add(from, to, "transfer", 0);
  const drafters = workers.filter(({ role }) => role === "draft");
  for (const worker of workers.filter(({ role }) => role === "decode")) {
    for (const { id } of drafters) add(worker.id, id, "draft", 0);
  }
  for (const { stage, workers: by, drafts_at: drafter } of requests) {
    if (stage === "prefill") add("router", by.prefill ?? by.decode, "prefill", 1);
    if (stage === "transfer") add(by.prefill, by.decode, "transfer", 1);
    if (stage === "decode") add(by.prefill ?? "router", by.decode, "decode", 1);
    if (stage === "decode" && drafter) add(by.decode, drafter, "draft", 1);
  }
  return [...flows.values()].filter(({ from, to }) => nodes.has(from) && nodes.has(to));
}

function line({ from, to, stage, number }) {
  const width = number ? Math.min(7, 1.5 + Math.sqrt(number)) : 1;
  return svg("path", { class: number ? `busy ${stage}` : "", d: track(from, to), "stroke-width": width });
}

/** Return a path from one node's right side to the other's left side, below any column in between. */
function track(from, to) {
  const [one, other] = [nodes.get(from), nodes.get(to)];
  const begin = [one.x + one.width, one.y + NODE.height / 2];
  const end = [other.x, other.y + NODE.height / 2];
  if (end[0] < begin[0]) return aside(begin, [other.x + other.width, end[1]]);
  const between = [...nodes.values()].filter((node) => node.x > begin[0] && node.x + node.width < end[0]);
  if (!between.length) return curve(begin, end);
  const left = Math.min(...between.map((node) => node.x));
  const right = Math.max(...between.map((node) => node.x + node.width));
  return `${curve(begin, [left, lane])} L${right},${lane} ${curve([right, lane], end).replace(/^M\S+/, "")}`;
}

/** Return a path between two nodes of one column. */
const aside = (begin, end) => `M${begin} C${begin[0] + 18},${begin[1]} ${end[0] + 18},${end[1]} ${end}`;

function curve(begin, end) {
  const bend = (end[0] - begin[0]) / 2;
  return `M${begin} C${begin[0] + bend},${begin[1]} ${end[0] - bend},${end[1]} ${end}`;
}

/** Return labels for the lines if these are few and long enough; the list below the diagram has all labels. */
function labels(links) {
  const shown = links.filter(({ from, to }) => nodes.has(from) && nodes.has(to));
  if (shown.length > MAX_LABELS) return [];
  return shown.flatMap(({ from, to, transport, bytes_per_s: speed }) => {
    const [one, other] = [nodes.get(from), nodes.get(to)];
    const room = other.x - one.x - one.width;
    if (room < 90) return [];
    const [x, y] = [one.x + one.width + room / 2, (one.y + other.y + NODE.height) / 2 + 4];
    const facts = speed ? `${transport} ${bytes(speed)}/s` : transport;
    return svg("text", { class: "label", x, y, "text-anchor": "middle" }, facts);
  });
}

/** Send a dot for each new placement from the router to the prefill worker, and on to the decode worker. */
export function sendDots({ fresh }) {
  if (stillness.matches || document.hidden) return;
  const sent = fresh.slice(-MAX_DOTS);
  sent.forEach(({ chosen: { workers: by } }, index) => {
    const stops = ["router", by.prefill, by.decode].filter((id) => id && nodes.has(id));
    if (stops.length < 2) return;
    const path = stops.slice(1).map((id, place) => track(stops[place], id)).join(" ");
    const dur = `${0.6 * (stops.length - 1)}s`;
    const move = svg("animateMotion", { dur, path, begin: "indefinite", fill: "freeze" });
    const dot = svg("circle", { r: 0 }, move);
    dots.append(dot);
    setTimeout(() => {
      dot.setAttribute("r", 4);
      move.beginElement();
    }, (index / sent.length) * 900);
    move.addEventListener("endEvent", () => dot.remove());
  });
}
