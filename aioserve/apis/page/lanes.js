// Draws: requests as lanes through time, and below them steps and KV blocks on the same axis.
// Knows the story and a canvas; knows nothing of the stream.
// @ts-check

import { nameLane, short } from "./words.js";

const MIN_LANE = 5, MAX_LANE = 20; // pixels
const LABEL = 13; // pixels of a name: of lower lanes some have none

export class Palette {
  constructor() {
    /** @type {Map<string, CanvasPattern | null>} */
    this.stripes = new Map();
    this.read();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.read());
  }
  read() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["paper", "panel", "ink", "faint", "line", "queued", "prefill", "decode",
      "preempted", "done", "bad", "held", "leased", "cached", "chosen"])
      this[name] = style.getPropertyValue(`--${name}`).trim();
    this.font = `11px ${style.getPropertyValue("--font").trim()}`;
    this.stripes = new Map();
  }
  // What waits is striped, so that it is told from what runs without colours.
  /** @returns {any} a style to fill with */
  striped(context, color) {
    if (!this.stripes.has(color)) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 6;
      const pen = penOf(tile);
      pen.strokeStyle = color;
      pen.lineWidth = 1.6;
      pen.beginPath();
      for (const x of [-6, 0, 6]) { pen.moveTo(x, 6); pen.lineTo(x + 6, 0); }
      pen.stroke();
      this.stripes.set(color, context.createPattern(tile, "repeat"));
    }
    return this.stripes.get(color);
  }
}

/**
 * @param {HTMLCanvasElement} canvas
 * @returns {CanvasRenderingContext2D}
 */
const penOf = (canvas) => /** @type {any} */ (canvas.getContext("2d"));

class Plot {
  constructor(canvas, palette) {
    this.canvas = canvas;
    this.palette = palette;
    this.pen = penOf(canvas);
    this.gutter = this.from = this.to = this.right = this.perMs = 0;
    /** @type {{ time: number, label: string }[]} */
    this.ticks = [];
    this.width = this.height = 0;
    new ResizeObserver(() => this.fit()).observe(canvas);
    this.fit();
  }
  fit() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const scale = Math.min(devicePixelRatio || 1, 2);
    this.width = Math.round(width);
    this.height = Math.round(height);
    this.canvas.width = Math.max(1, Math.round(width * scale));
    this.canvas.height = Math.max(1, Math.round(height * scale));
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
  }
  begin(view) {
    this.gutter = view.gutter;
    this.from = view.to - view.window;
    this.to = view.to;
    this.right = view.right; // of all plots alike: one of them may have a scroll bar
    this.perMs = (view.right - view.gutter) / view.window;
    this.ticks = view.ticks;
    this.pen.clearRect(0, 0, this.width, this.height);
    this.pen.font = this.palette.font;
    this.pen.textBaseline = "middle";
  }
  x(time) { return this.gutter + (time - this.from) * this.perMs; }
  clip(draw) {
    this.pen.save();
    this.pen.beginPath();
    this.pen.rect(this.gutter, 0, this.right - this.gutter, this.height);
    this.pen.clip();
    draw();
    this.pen.restore();
  }
  lines(y0, y1) { // thin ones, where the axis has its numbers
    this.pen.fillStyle = this.palette.line;
    for (const { time } of this.ticks) this.pen.fillRect(Math.round(this.x(time)), y0, 1, y1 - y0);
  }
  label(text, y) {
    this.pen.fillStyle = this.palette.faint;
    this.pen.textAlign = "right";
    this.pen.fillText(text, this.gutter - 6, y);
  }
}

// The numbers of the axis that all share.
export class Axis extends Plot {
  draw(view) {
    const { pen } = this;
    this.begin(view);
    pen.fillStyle = this.palette.faint;
    let last = null;
    for (const { time, label } of view.ticks) {
      const text = label || new Date(1e3 * view.began + time).toLocaleTimeString("en-GB");
      const half = pen.measureText(text).width / 2;
      const x = Math.max(half, Math.min(this.x(time), this.right - half));
      if (last !== null && Math.abs(x - last.x) < half + last.half + 6) continue;
      last = { x, half };
      pen.textAlign = "center";
      pen.fillText(text, x, this.height / 2);
    }
  }
}

export class Lanes extends Plot {
  constructor(canvas, scroller, spacer, palette) {
    super(canvas, palette);
    this.scroller = scroller;
    this.spacer = spacer;
    this.shown = []; // by lane, the requests that can be seen; no lane is empty
    this.lane = MAX_LANE;
    this.numDrawn = 0; // lanes, in all
  }
  at(x, y) { // the request there, in pixels of the canvas; left of the axis, the lane's request now
    const lane = this.shown[Math.floor((y + this.scroller.scrollTop) / this.lane)] ?? [];
    const time = x < this.gutter ? this.to : this.from + (x - this.gutter) / this.perMs;
    let found = null, least = Infinity;
    for (const life of lane) {
      const distance = Math.max(life.spans[0].from - time, time - (life.end ?? this.to), 0);
      if (distance < least) [found, least] = [life, distance];
    }
    return least * this.perMs < 12 || x < this.gutter ? found : null;
  }
  draw(story, view, hovered) {
    const { pen, palette } = this;
    this.begin(view);
    this.shown = [];
    this.onlyRunners = view.onlyRunners;
    for (const life of story.between(this.from, this.to)) {
      const lane = view.onlyRunners ? life.runLane : life.lane;
      if (lane !== null) (this.shown[lane] ??= []).push(life);
    }
    this.shown = this.shown.filter(Boolean); // lanes that are empty here take no room
    const fitting = Math.floor(this.height / Math.max(this.shown.length, 1));
    this.lane = Math.max(MIN_LANE, Math.min(MAX_LANE, fitting));
    const needed = `${this.shown.length * this.lane}px`;
    if (this.spacer.style.height !== needed) this.spacer.style.height = needed;
    this.lines(0, this.height);
    const top = this.scroller.scrollTop;
    const first = Math.floor(top / this.lane);
    const last = Math.min(this.shown.length, Math.ceil((top + this.height) / this.lane));
    this.clip(() => {
      for (const { time } of story.switches) {
        pen.fillStyle = palette.chosen;
        pen.fillRect(Math.round(this.x(time)), 0, 2, this.height);
      }
      for (let i = first; i < last; i++)
        for (const life of this.shown[i] ?? [])
          this.drawLife(life, i * this.lane - top, story.chosen, hovered);
    });
    this.drawNames(story, first, last, top);
    this.numDrawn += last - first;
  }
  // Of neighbours with one name, one: beside a line that holds them together.
  drawNames(story, first, last, top) {
    const { pen, palette } = this;
    const room = Math.floor((this.gutter - 12) / 6.6);
    pen.textAlign = "left";
    let below = -Infinity;
    for (let i = first, next; i < last; i = next) {
      const name = nameLane(this.shown[i] ?? [], story.own, room);
      for (next = i + 1; next < last && name && nameLane(this.shown[next] ?? [], story.own, room) === name;) next++;
      const middle = ((i + next) / 2) * this.lane - top;
      if (!name || middle - LABEL / 2 < below) continue;
      below = middle + LABEL / 2;
      pen.fillStyle = this.shown[i].includes(story.chosen) ? palette.ink : palette.faint;
      pen.fillText(short(name, room), 2, middle);
      if (next - i > 1) pen.fillRect(this.gutter - 6, i * this.lane - top + 1, 1, (next - i) * this.lane - 2);
    }
  }
  drawLife(life, y, chosen, hovered) {
    const { pen, palette } = this;
    const inset = this.lane > 8 ? 2 : this.lane > 5 ? 1 : 0.5;
    const height = this.lane - 2 * inset;
    if (life === chosen || life === hovered) {
      pen.fillStyle = life === chosen ? palette.chosen : palette.line;
      pen.globalAlpha = life === chosen ? 0.35 : 0.7;
      const [first] = this.onlyRunners && life.spans.length > 1 ? life.spans.slice(1) : life.spans;
      const x0 = this.x(first.from) - 3;
      pen.fillRect(x0, y, this.x(life.end ?? this.to) + 4 - x0, this.lane);
      pen.globalAlpha = 1;
    }
    for (const { kind, from, to } of life.spans) {
      const end = to ?? life.end ?? this.to;
      if (end < this.from || (kind === "queued" && this.onlyRunners)) continue; // not in that lane
      const x0 = Math.max(this.x(from), this.gutter - 2), x1 = this.x(Math.min(end, this.to));
      const width = Math.max(x1 - x0, 1);
      if (kind === "queued" || kind === "preempted" || kind === "paused") {
        pen.fillStyle = palette.striped(pen, kind === "paused" ? palette.decode : palette[kind]);
        pen.fillRect(x0, y + inset + height / 4, width, height / 2);
        if (kind === "preempted") {
          pen.fillStyle = palette.preempted;
          pen.fillRect(x0, y + inset, 2, height);
        }
      } else if (kind === "decode") {
        pen.fillStyle = palette.decode;
        pen.fillRect(x0, y + inset, width, height);
      } else if (kind === "prefill") {
        pen.fillStyle = palette.prefill; // thin, where it holds its place and waits for a chunk
        pen.fillRect(x0, y + inset + height / 2 - 0.5, width, 1);
      }
    }
    pen.fillStyle = palette.prefill;
    for (let i = life.chunks.length - 1; i >= 0; i--) {
      const { from, to } = life.chunks[i];
      const end = to ?? this.to;
      if (end < this.from) break;
      const x0 = this.x(from);
      pen.fillRect(x0, y + inset, Math.max(this.x(end) - x0 - 0.5, 1), height);
    }
    if (life.end !== null && life.end >= this.from) this.drawEnd(life, this.x(life.end), y + inset, height);
  }
  // Told apart by form, not by colour alone.
  drawEnd({ finish }, x, y, height) {
    const { pen, palette } = this;
    const isWell = !["abort", "timeout", "error", "rejected"].includes(finish);
    pen.fillStyle = pen.strokeStyle = isWell ? palette.done : palette.bad;
    if (finish === "abort") pen.strokeRect(x + 0.5, y + 0.5, 4, Math.max(height - 1, 2));
    else if (finish === "timeout") {
      pen.beginPath();
      pen.moveTo(x + 6, y - 1);
      pen.lineTo(x + 6, y + height + 1);
      pen.lineTo(x, y + height / 2);
      pen.fill();
    } else pen.fillRect(x, y - 0.5, isWell ? 2 : 4, height + 1);
  }
}

// Tokens of each step: prompts on top of decodes.
export class StepStrip extends Plot {
  draw(story, view) {
    const { pen, palette } = this;
    this.begin(view);
    const steps = story.steps;
    let first = steps.length;
    while (first > 0 && (steps[first - 1].back ?? this.to) >= this.from) first--;
    let most = 1;
    for (let i = first; i < steps.length; i++) most = Math.max(most, steps[i].total);
    this.lines(4, this.height);
    const scale = (this.height - 6) / most;
    this.clip(() => {
      let column = -1, peak = 0;
      for (let i = first; i < steps.length; i++) {
        const step = steps[i];
        const x0 = this.x(step.time), x1 = this.x(step.back ?? this.to);
        const at = Math.floor(x0);
        if (at === column && step.total <= peak) continue; // hidden by a higher one
        column = at;
        peak = step.total;
        const width = Math.max(x1 - x0 - 0.3, 1);
        pen.fillStyle = palette.decode;
        pen.fillRect(x0, this.height - step.decode * scale, width, step.decode * scale);
        pen.fillStyle = palette.prefill;
        pen.fillRect(x0, this.height - step.total * scale, width, step.prefill * scale);
      }
    });
    if (first < steps.length) this.label(`${most}`, 9);
    this.label("tokens", this.height / 2 + 2);
    this.label("a step", this.height / 2 + 14);
  }
}

// KV blocks: held by requests, by leases, and without a holder but found again.
export class BlockStrip extends Plot {
  draw(story, view) {
    const { pen, palette } = this;
    this.begin(view);
    const { kv, about } = story;
    if (!about) return;
    let most = about.num_blocks / 100;
    const first = Math.max(kv.findLastIndex(({ time }) => time <= this.from), 0);
    for (const { used, cached } of kv.slice(first)) most = Math.max(most, 1.1 * (used + cached));
    most = Math.ceil(Math.min(most, about.num_blocks));
    const scale = (this.height - 6) / most;
    this.lines(4, this.height);
    this.clip(() => {
      for (const [color, top] of [
        [palette.cached, ({ used, cached }) => used + cached],
        [palette.leased, ({ used }) => used],
        [palette.held, ({ used, leased }) => used - leased],
      ]) {
        pen.fillStyle = color;
        pen.beginPath();
        pen.moveTo(this.x(kv[first]?.time ?? this.from), this.height);
        let y = this.height;
        for (let i = first; i < kv.length; i++) {
          const x = this.x(kv[i].time);
          pen.lineTo(x, y);
          y = this.height - top(kv[i]) * scale;
          pen.lineTo(x, y);
        }
        pen.lineTo(this.x(this.to), y);
        pen.lineTo(this.x(this.to), this.height);
        pen.fill();
      }
      pen.fillStyle = palette.line;
      pen.fillRect(this.gutter, 5, this.width, 1);
    });
    this.label(most.toLocaleString("en"), 9);
    this.label("KV", this.height / 2 + 2);
    this.label("blocks", this.height / 2 + 14);
  }
}
