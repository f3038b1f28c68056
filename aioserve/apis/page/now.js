// Now: numbers, lanes, the last step, and the same as a table.
// @ts-check

import { Axis, BlockStrip, Lanes, Palette, StepStrip } from "./lanes.js";
import { fit, lastTraffic, ticks } from "./span.js";
import { ENDS, REASONS, STATES, byId, count, duration, element, nameOf, plural, short } from "./words.js";

const TABLE_ROWS = 200;
const TABLE_MS = 1000;
const BEHIND_MS = 120; // frames come in pieces: what is drawn is this much older

export class Now {
  /**
   * @param {import("./story.js").Story} story
   * @param {(life: import("./life.js").Life | null) => void} choose
   */
  constructor(story, choose) {
    this.story = story;
    this.choose = choose;
    this.hovered = null;
    this.heldAt = null;
    this.onResume = () => {};
    /** @type {{ frame: number, last: ReturnType<typeof lastTraffic> } | null} */
    this.traffic = null; // the last, as of a frame
    this.lastTable = 0;
    this.numDrawn = 0;
    const palette = new Palette();
    this.lanes = new Lanes(byId("lanes"), byId("scroller"), byId("spacer"), palette);
    this.steps = new StepStrip(byId("steps"), palette);
    this.blocks = new BlockStrip(byId("blocks"), palette);
    this.axis = new Axis(byId("axis"), palette);
    byId("base-url").textContent = new URL("v1", location.href).href;
    this.tiles = new Map();
    for (const name of ["running", "waiting", "tokens/s", "first token", "gap", "loop lag", "KV blocks"]) {
      const value = element("dd", {}, "–");
      this.tiles.set(name, value);
      byId("tiles").append(element("div", {}, element("dt", {}, name), value));
    }
    this.tip = byId("tip");
    byId("hold").addEventListener("click", () => this.hold(!this.isHeld));
    const canvas = byId("lanes");
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.point(null));
    byId("scroller").addEventListener("scroll", () => this.point(null), { passive: true });
    canvas.addEventListener("click", (event) => {
      const life = this.lanes.at(event.offsetX, event.offsetY);
      if (life) this.choose(life);
    });
  }

  get isHeld() { return this.heldAt !== null; }

  hold(isHeld) {
    this.heldAt = isHeld ? this.story.time() - BEHIND_MS : null;
    byId("hold").textContent = isHeld ? "Resume" : "Hold";
    byId("hold").classList.toggle("on", isHeld);
    if (!isHeld) this.onResume();
  }

  view() {
    const width = this.lanes.width;
    const now = this.heldAt ?? this.story.time() - BEHIND_MS;
    const seconds = byId("window").value;
    if (this.traffic?.frame !== this.story.numFrames)
      this.traffic = { frame: this.story.numFrames, last: lastTraffic(this.story.lives.values(), now) };
    const span = seconds === "fit" ? fit(this.traffic?.last ?? null, now)
      : { to: now, window: 1e3 * Number(seconds), isMoving: true };
    if (this.isHeld) span.isMoving = false;
    const gutter = width > 700 ? 132 : 92;
    return {
      ...span,
      ticks: ticks(span, (width - gutter) / span.window),
      began: this.story.about.unix_time,
      gutter,
      right: width,
      onlyRunners: byId("runners").checked,
    };
  }

  draw() {
    const { story } = this;
    if (!story.about) return;
    const view = this.view();
    this.lanes.draw(story, view, this.hovered);
    this.steps.draw(story, view);
    this.blocks.draw(story, view);
    this.axis.draw(view);
    const isEmpty = !this.lanes.shown.length;
    if (isEmpty === byId("empty").hidden) {
      byId("empty").hidden = !isEmpty;
      byId("empty-words").textContent = story.lives.size
        ? "No request in these seconds. “Seconds that fit” goes back to the last ones."
        : "No request has come since this page was opened.";
    }
    this.numDrawn++;
  }

  words() {
    const { story } = this;
    const { gauges, about } = story;
    const { tokensPerSecond, lag, gap, firstToken } = story.measures();
    this.tell("running", count(gauges.num_running), `of ${count(about.max_num_seqs)}`);
    this.tell("waiting", count(gauges.num_waiting), this.commonReason());
    this.tell("tokens/s", count(tokensPerSecond), "");
    this.tell("first token", duration(firstToken[0]), `p99 ${duration(firstToken[1])}`);
    this.tell("gap", duration(gap[0]), `p99 ${duration(gap[1])}`);
    this.tell("loop lag", duration(lag), "");
    const used = gauges.num_used_blocks / about.num_blocks;
    this.tell("KV blocks", `${(100 * used).toFixed(used < 0.1 ? 1 : 0)}%`, `of ${count(about.num_blocks)}`);
    this.lastStep();
    this.leases();
    this.ofPolicy();
    const label = `Requests as lanes through time: ${gauges.num_running} run, ${gauges.num_waiting} wait`;
    if (this.lanes.canvas.getAttribute("aria-label") !== label)
      this.lanes.canvas.setAttribute("aria-label", label);
    const now = performance.now();
    if (byId("table").open && now - this.lastTable > TABLE_MS) {
      this.lastTable = now;
      this.table();
    }
  }

  // The reason for which most waiting requests wait.
  commonReason() {
    const counts = new Map();
    for (const life of this.story.lives.values())
      if (life.waits && life.reason) counts.set(life.reason, (counts.get(life.reason) ?? 0) + 1);
    const [most] = [...counts].sort((a, b) => b[1] - a[1]);
    return most ? `for ${most[0].replaceAll("_", " ")}` : "";
  }

  tell(name, value, more) {
    const node = this.tiles.get(name);
    const text = `${value} ${more}`;
    if (node.dataset.text === text) return;
    node.dataset.text = text;
    node.replaceChildren(value, element("small", {}, more || "\u00a0"));
  }

  // Conversations whose prefixes the policy has pinned, the newest first.
  leases() {
    const { gauges, now } = this.story;
    const names = gauges.leases.map(([user, id, blocks, ends]) =>
      `${[user, id].filter(Boolean).join(" ")} ${plural(blocks, "block")}, ${duration(Math.max(ends - now, 0))} left`);
    const more = gauges.num_leases - names.length;
    if (more > 0) names.push(`${count(more)} more`);
    const total = `${plural(gauges.num_leases, "lease")} hold${gauges.num_leases === 1 ? "s" : ""} ${plural(gauges.num_leased_blocks, "block")} that no request holds`;
    const text = gauges.num_leases ? `${total}: ${names.join(" · ")}` : "";
    if (byId("leases").textContent === text) return;
    byId("leases").textContent = text;
    byId("leases").hidden = !text;
  }

  // What the policy shows of itself, if it does.
  ofPolicy() {
    const { gauges, about } = this.story;
    const shown = Object.entries(gauges.of_policy);
    const words = shown.map(([name, value]) => `${name.replaceAll("_", " ")} ${Number.isInteger(value) ? count(value) : value.toPrecision(4)}`);
    const text = words.length ? `${about.policy}: ${words.join(" · ")}` : "";
    if (byId("of-policy").textContent === text) return;
    byId("of-policy").textContent = text;
    byId("of-policy").hidden = !text;
  }

  // The step's budget, and the requests that fill it.
  lastStep() {
    const { steps, gauges, unanswered } = this.story;
    if (!steps.length) return;
    // The fullest of the last moment: of many short steps, one by chance says little.
    const since = this.story.now - 250;
    let step = steps[steps.length - 1];
    for (let i = steps.length - 1; i >= 0 && steps[i].time >= since; i--)
      if (steps[i].total > step.total) step = steps[i];
    const isIdle = !unanswered.size && this.story.now - step.time > 1500;
    const title = `Step ${count(step.id)}${isIdle ? ", the last one" : ""}: ${plural(step.total, "token")} of at most ${count(gauges.step_limit)}`;
    if (byId("step-title").textContent === title) return;
    byId("step-title").textContent = title;
    const chunks = [...step.chunks].sort((a, b) => b[1] - a[1]);
    const spans = [];
    const whole = Math.max(step.total, 1);
    const add = (kind, tokens, words) => {
      const span = element("span", { class: kind, title: words }, tokens > 0.09 * whole ? words : "");
      span.style.width = `${(100 * tokens) / whole}%`;
      spans.push(span);
    };
    if (step.decode) add("decode", step.decode, plural(step.decode, "decode"));
    for (const [life, tokens] of chunks.slice(0, 12)) add("prefill", tokens, `${tokens} of ${short(nameOf(life, this.story.own), 20)}`);
    const rest = chunks.slice(12).reduce((sum, [, tokens]) => sum + tokens, 0);
    if (rest) add("prefill", rest, `${rest} of others`);
    byId("step-bar").replaceChildren(...spans);
    const words = [plural(step.decode, "decode token")];
    if (chunks.length) {
      const names = chunks.slice(0, 3).map(([life, tokens]) => `${tokens} for ${short(nameOf(life, this.story.own), 20)}`);
      if (chunks.length > 3) names.push(`${chunks.length - 3} more`);
      words.push(`${plural(step.prefill, "prompt token")}: ${names.join(", ")}`);
    }
    if (step.encoded) words.push(`images of ${plural(step.encoded, "token")} encoded`);
    if (step.back !== null) words.push(`took ${duration(step.back - step.time)}`);
    byId("step-words").textContent = words.join(" · ");
  }

  point(event) {
    const life = event ? this.lanes.at(event.offsetX, event.offsetY) : null;
    this.hovered = life;
    this.tip.hidden = !life;
    if (!life) return;
    this.tip.replaceChildren(element("b", {}, this.title(life)), describe(life, this.story.now));
    const { width, height } = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(6, Math.min(event.clientX + 14, innerWidth - width - 6))}px`;
    this.tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
  }

  title(life) { return `${nameOf(life, this.story.own)}: ${life.id}`; }

  table() {
    const lives = [...this.story.lives.values()].filter((life) => life.end === null);
    lives.sort((a, b) => Number(a.waits) - Number(b.waits) || a.number - b.number);
    const rows = lives.slice(0, TABLE_ROWS).map((life) => element("tr", { "aria-selected": life === this.story.chosen ? "true" : null },
      element("th", { scope: "row" }, element("button", {
        type: "button", class: "link", title: life.id, onclick: () => this.choose(life),
      }, short(`${life.number}: ${life.user || life.id}`, 26))),
      element("td", { class: "left" }, life.waits && life.reason ? `${STATES[life.state]}: ${REASONS[life.reason] ?? life.reason}` : STATES[life.state]),
      ...[life.prompt, life.cached, life.output].map((value) => element("td", {}, count(value))),
      element("td", {}, duration(life.waited(this.story.now))),
      element("td", {}, count(life.preemptions)),
    ));
    // The focus stays on the request that has it.
    /** @type {any} */
    const active = document.activeElement;
    const focused = active?.closest("#rows") ? active.title : null;
    byId("rows").replaceChildren(...(rows.length ? rows : [element("tr", {}, element("td", { colspan: 7 }, "No request is here."))]));
    if (focused) [...byId("rows").querySelectorAll("button")].find((button) => button.title === focused)?.focus();
    byId("more").textContent = lives.length > TABLE_ROWS ? `and ${plural(lives.length - TABLE_ROWS, "request")} more` : "";
  }
}

export function describe(life, now) {
  const parts = [];
  if (life.end !== null) parts.push(`${ENDS[life.finish] ?? life.finish}, after ${duration(life.end - life.arrival)}`);
  else if (life.waits) parts.push(`${STATES[life.state]}${life.reason ? `: ${REASONS[life.reason] ?? life.reason}` : ""}`);
  else parts.push(STATES[life.state]);
  parts.push(`waited ${duration(life.waited(now))}`);
  parts.push(`prompt ${count(life.prompt)}${life.cached ? ` (${count(life.cached)} cached)` : ""}`);
  parts.push(`${plural(life.output, "token")} out`);
  if (life.preemptions) parts.push(`preempted ${life.preemptions === 1 ? "once" : `${life.preemptions} times`}`);
  if (life.user) parts.push(`of ${life.user}`);
  if (life.priority) parts.push(`priority ${life.priority}`);
  return parts.join(" · ");
}
