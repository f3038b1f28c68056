// Why: the life of one request, step by step, and what was served in its stead.
// @ts-check

import { describe } from "./now.js";
import { REASONS, byId, count, duration, element, nameOf, plural, short } from "./words.js";

const NAMED = 3; // of the requests that were served in its stead
const LISTED = 300; // steps of a stretch that are shown one by one
const DRAWN_MS = 700;

export class Why {
  /**
   * @param {import("./story.js").Story} story
   * @param {(life: import("./life.js").Life | null) => void} choose
   */
  constructor(story, choose) {
    this.story = story;
    this.lastDrawn = 0;
    this.opened = new Set(); // stretches whose steps are shown, by their first step
    this.select = byId("choose");
    this.select.addEventListener("change", () => {
      choose(story.lives.get(Number(this.select.value)) ?? null);
    });
    for (const event of ["focus", "pointerdown"]) this.select.addEventListener(event, () => this.offer());
    byId("life").append(element("p", { class: "small" },
      "Choose a request: here stands what became of it in every step, why it waited, and what was served instead."));
  }

  offer() {
    const { lives, chosen } = this.story;
    const some = [...lives.values()].slice(-300).reverse();
    if (chosen && !some.includes(chosen)) some.unshift(chosen);
    const options = some.map((life) => new Option(`${count(life.number)}: ${short(life.id, 44)}${life.user ? ` of ${short(life.user)}` : ""}`, String(life.number), false, life === chosen));
    this.select.replaceChildren(new Option("choose one, here or among the lanes", ""), ...options);
  }

  name(life) { return life.user ? `${count(life.number)} of ${life.user}` : nameOf(life, this.story.own); }

  choose(life) {
    this.opened.clear();
    this.lastDrawn = 0;
    this.offer();
    this.select.value = life ? String(life.number) : "";
    this.words();
  }

  words() {
    const life = this.story.chosen;
    const now = performance.now();
    if (!life || now - this.lastDrawn < DRAWN_MS || life === this.finished) return;
    if (byId("life").contains(document.activeElement) && document.activeElement !== document.body && this.drawn === life && life.end === null && now - this.lastDrawn < 4 * DRAWN_MS) return;
    this.lastDrawn = now;
    this.drawn = life;
    this.finished = life.end !== null && !this.story.unanswered.size ? life : null;
    const stretches = this.stretches(life);
    const time = this.story.now;
    /** @type {("queued" | "prefill" | "decode" | "preempted" | "paused")[]} */
    const kinds = ["queued", "prefill", "decode", "preempted"];
    if (life.seconds("paused", time)) kinds.push("paused");
    const spent = kinds.map((kind) => /** @type {const} */ ([kind, life.seconds(kind, time)]));
    byId("life").replaceChildren(
      element("p", { class: "small" }, element("b", {}, life.id), " ", describe(life, time)),
      element("dl", { class: "facts" }, ...spent.map(([kind, ms]) => element("div", {},
        element("dt", {}, { queued: "waited in the queue", prefill: "prompt computed in", decode: "decoded for", preempted: "waited after a preemption", paused: "paused for" }[kind]),
        element("dd", {}, ms ? duration(ms) + (kind === "prefill" && life.chunks.length > 1 ? `, ${life.chunks.length} chunks` : "") : "–"))),
        element("div", {}, element("dt", {}, "first token after"), element("dd", {}, life.firstToken === null ? "–" : duration(life.firstToken - life.arrival))),
      ),
      this.table(life, stretches),
      ...(life.known > life.arrival + 500 ? [element("p", { class: "small" }, `We look since ${duration(life.known - life.arrival)} after it came: what was before is not known here.`)] : []),
    );
  }

  // What follows from the steps since it came: stretches in which the same became of it.
  stretches(life) {
    const found = [];
    const { steps } = this.story;
    let i = steps.findIndex((step) => step.time >= life.spans[0].from);
    if (i < 0) return found;
    const chunks = new Map(life.chunks.map((chunk) => [chunk.step, chunk.tokens]));
    const ends = life.end ?? Infinity;
    let rows = null, isIn = false;
    for (; i < steps.length && steps[i].time <= ends; i++) {
      const step = steps[i];
      if (step.lives !== rows) {
        rows = step.lives;
        isIn = rows.includes(life);
      }
      const chunk = chunks.get(step.id);
      const span = life.spans.findLast((one) => one.from <= step.time);
      const held = !isIn && (span?.kind === "prefill" || span?.kind === "decode");
      const kind = isIn ? (chunk ? "prefill" : "decode") : held ? "held" : span?.kind === "preempted" || span?.kind === "paused" ? span.kind : "queued";
      const reason = isIn || held ? "" : life.reasonAt(step.id);
      const last = found[found.length - 1];
      if (last && last.kind === kind && last.reason === reason && (kind !== "prefill" || last.step + last.steps.length === step.id)) last.steps.push(step);
      else found.push({ kind, reason, steps: [step], step: step.id, tokens: 0 });
      found[found.length - 1].tokens += chunk ?? 0;
    }
    return found;
  }

  table(life, stretches) {
    if (!stretches.length) {
      const words = life.end !== null ? "No step is known of it." : "No step was planned since it came.";
      return element("p", { class: "small" }, words);
    }
    const rows = stretches.slice(-400).map((stretch) => this.row(life, stretch));
    return element("div", { class: "life" }, element("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Its life, step by step" },
      element("table", {}, element("thead", {}, element("tr", {},
        ...["steps", "after", "for", "what became of it", "what was served instead"].map((name) => element("th", { scope: "col", class: "left" }, name)))),
      element("tbody", {}, ...rows))));
  }

  row(life, { kind, reason, steps, step, tokens }) {
    const first = steps[0], last = steps[steps.length - 1];
    const end = last.back ?? this.story.now;
    const name = steps.length === 1 ? count(step) : `${count(step)} – ${count(last.id)}`;
    const what = {
      queued: `waited: ${REASONS[reason] ?? "no step has looked at it yet"}`,
      preempted: `preempted, waited: ${REASONS[reason] ?? "not asked for"}`,
      paused: `paused, waited: ${REASONS[reason] ?? "not asked for"}`,
      prefill: `${plural(tokens, "token")} of its prompt`,
      decode: `${plural(steps.length, "step")} of decoding`,
      held: "held its place, got nothing",
    }[kind];
    const isWaiting = ["queued", "preempted", "paused", "held"].includes(kind);
    const isOpen = this.opened.has(step);
    const button = element("button", {
      type: "button", class: "link", "aria-expanded": String(isOpen), title: "step by step",
      onclick: () => {
        if (isOpen) this.opened.delete(step);
        else this.opened.add(step);
        this.lastDrawn = 0;
        this.finished = null;
        this.drawn = null;
        this.words();
        byId("life").querySelector(`[data-step="${step}"] button`)?.focus();
      },
    }, name);
    return element("tr", { "data-step": step },
      element("td", {}, steps.length > 1 ? button : name, ...(isOpen ? [this.list(life, steps, isWaiting)] : [])),
      element("td", { class: "number" }, duration(first.time - life.arrival)),
      element("td", { class: "number" }, duration(end - first.time)),
      element("td", { class: "wrap" }, element("i", { class: kind === "held" ? "queued" : kind }), what,
        reason === "policy" ? this.firstInLine(life, last) : ""),
      element("td", { class: "wrap" }, isWaiting ? this.preferred(life, steps) : beside(steps)),
    );
  }

  // A policy that is stopped by a request does not ask for those behind: which one, and why.
  firstInLine(life, step) {
    for (const other of this.story.lives.values()) {
      if (other === life || (other.end !== null && other.end < step.time)) continue;
      const reason = other.reasonAt(step.id);
      if (!reason || reason === "policy") continue;
      const span = other.spans.findLast((one) => one.from <= step.time);
      if (span && ["queued", "preempted", "paused"].includes(span.kind))
        return `; it stopped at ${short(this.name(other), 24)}: ${REASONS[reason] ?? reason}`;
    }
    return "";
  }

  // What got tokens in these steps while it did not; prompts by name, since they took the most.
  preferred(life, steps) {
    const prompts = new Map();
    let decodes = 0, overtaken = 0;
    for (const step of steps) {
      decodes += step.decode;
      for (const [other, tokens] of step.chunks) prompts.set(other, (prompts.get(other) ?? 0) + tokens);
      for (const other of step.admitted) if (other && other.arrival > life.arrival) overtaken++;
    }
    const named = [...prompts].sort((a, b) => b[1] - a[1]);
    const words = named.slice(0, NAMED).map(([other, tokens]) => {
      const how = other.arrival > life.arrival ? ", which came later" : "";
      return `${short(this.name(other), 24)} (${plural(tokens, "prompt token")}${how})`;
    });
    if (named.length > NAMED) words.push(`${plural(named.length - NAMED, "prompt")} more`);
    if (decodes) words.push(`${plural(decodes, "decode token")} of requests that ran`);
    if (!words.length) return "nothing: the step was empty";
    return words.join("; ") + (overtaken ? `. ${plural(overtaken, "later request")} overtook it` : "");
  }

  list(life, steps, isWaiting) {
    const items = steps.slice(0, LISTED).map((step) => element("li", {},
      `${count(step.id)}: ${step.back === null ? "computes" : duration(step.back - step.time)}, ${plural(step.total, "token")} for ${step.lives.length}`,
      isWaiting && step.chunks.length ? `, prompts of ${step.chunks.slice(0, NAMED).map(([other]) => short(this.name(other), 20)).join(", ")}` : "",
      step.preempted ? `, ${step.preempted} preempted` : ""));
    if (steps.length > LISTED) items.push(element("li", {}, `and ${plural(steps.length - LISTED, "step")} more`));
    return element("ul", { class: "small" }, ...items);
  }
}

function beside(steps) {
  const most = Math.max(...steps.map((step) => step.lives.length)) - 1;
  return most ? `nothing: it ran, beside up to ${plural(most, "other")}` : "nothing: it ran alone";
}
