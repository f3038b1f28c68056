// Numbers and reasons in words. Knows nothing about what is asked for.
// @ts-check

export const REASONS = {
  budget: "no tokens left in the step",
  seats: "all seats are taken",
  adapters: "no place for its adapter",
  blocks: "its tokens do not fit the free KV blocks",
  leases: "no free KV blocks: pinned prefixes hold some",
  states: "no slot for its states",
  windows: "no blocks for its windows",
  encoder_budget: "its image does not fit the step",
  deadline: "it will miss its deadline anyway",
  preempted: "it gave way in this very step",
  paused: "the policy paused it: it keeps its KV blocks",
  remote_kvs: "its blocks are being read from elsewhere",
  in_flight: "a step that still has it is not back",
  policy: "the policy did not ask for it, and nothing stopped it from asking",
};

export const STATES = {
  queued: "queued", prefill: "prefill", decode: "decode", preempted: "preempted", paused: "paused", done: "done",
};

export const count = (value) => Math.round(value).toLocaleString("en");

export function duration(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  if (ms === Infinity) return "> 60 s";
  if (ms >= 99950) return `${count(ms / 1e3)} s`;
  if (ms >= 1000) return `${(ms / 1e3).toFixed(ms >= 9995 ? 1 : 2)} s`;
  if (ms >= 99.5) return `${ms.toFixed(0)} ms`;
  return `${ms.toFixed(ms >= 9.95 ? 1 : 2)} ms`;
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

// Long ids keep their ends: that is where they differ.
export function short(id, length = 18) {
  if (id.length <= length) return id;
  const tail = Math.floor((length - 1) / 2);
  return `${id.slice(0, length - 1 - tail)}…${id.slice(-tail)}`;
}

// A request of a client that said no name, by its number in the order of arrival.
export const nameOf = (life, own) => (own.has(life.id) ? "this chat" : life.user || `request ${count(life.number)}`);

// A lane: its user, or the requests that had it, one after the other.
export function nameLane(lives, own, room) {
  const names = new Set(lives.map((life) => nameOf(life, own)));
  if (names.size <= 1) return [...names][0] ?? "";
  const users = new Set(lives.map((life) => life.user));
  if (users.size > 1 || lives.some((life) => own.has(life.id))) return `${lives.length} requests`;
  const [first, last] = [lives[0].number, lives.at(-1).number];
  return room < 15 ? `#${first}–${last}` : `requests ${first}–${last}`;
}

export const ENDS = { stop: "done", length: "done: it had all its tokens", tool_calls: "done: it called a tool",
  abort: "aborted: its client left, or an operator ended it", timeout: "timed out", error: "failed",
  rejected: "rejected by the policy before it ran" };

/**
 * An element of page.html, of the kind that it has there.
 * @param {string} id
 * @returns {any}
 */
export const byId = (id) => document.getElementById(id);

/** @returns {any} an element of the kind that its name says */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
