// What is known of requests and steps: built up from the frames of the stream.
// Knows times in milliseconds since the watching began; knows no network and nothing that is drawn.
// @ts-check

import { Life, asCame } from "./life.js";

const MAX_STEPS = 20000;
const MAX_ROWS = 4e6; // references in all steps that are kept: 32 MB
const KEPT_MS = 65000; // requests that ended longer before the last event are forgotten
const RECENT_MS = 10000; // what percentiles are of
const REUSED_MS = 20000; // after which another user may have a lane
const MAX_OWN_LANES = 100; // of more, another user has one at once

/** @typedef {import("./frames.js").Frame} Frame */
/** @typedef {import("./frames.js").Snapshot} Snapshot */
/** @typedef {import("./life.js").Step} Step */

/** @param {import("./frames.js").Planned} row */
const asPlanned = ([id, time, joined, left, tokens, admitted, preempted, total, running, waiting, used, encoded, paused]) =>
  ({ id, time, joined, left, tokens, admitted, preempted, total, running, waiting, used, encoded, paused });

// What a snapshot tells anew.
class Watched {
  /** @type {import("./frames.js").About} */
  about = /** @type {any} */ (null); // until the first snapshot
  /** @type {import("./frames.js").Gauges} */
  gauges = /** @type {any} */ (null); // so, too
  /** @type {import("./frames.js").Shadow | null} */
  shadow = null;
  /** @type {Map<number, Life>} */
  lives = new Map(); // by number, in order of arrival
  /** @type {Life[]} */
  lanes = []; // which has each, last: a lane is used again
  /** @type {Life[]} */
  runLanes = [];
  /** @type {Map<string, Life>} */
  byId = new Map();
  /** @type {Step[]} */
  steps = []; // with the requests that were in them
  /** @type {Map<number, Step>} */
  unanswered = new Map(); // steps that are not back, by id
  /** @type {Life[]} */
  rows = []; // of the last step
  numRows = 0;
  /** @type {Set<Life>} */
  prefilling = new Set();
  /** @type {{ time: number, policy: string }[]} */
  switches = [];
  /** @type {{ time: number, used: number, leased: number, cached: number }[]} */
  kv = []; // from then on
  /** @type {{ time: number, tokens: number, lag: number, gaps: [number, number][], firstTokens: number[] }[]} */
  recent = [];
  began = 0;
  lastEvent = 0; // when something came, ran or ended
  now = 0;
}

export class Story extends Watched {
  constructor() {
    super();
    /** @type {Set<string>} */
    this.own = new Set(); // requests of this page, by the ids that frames show
    /** @type {Life | null} */
    this.chosen = null;
    this.numFrames = this.numSnapshots = 0;
    this.numCame = 0; // requests, while this page looked
    this.offset = Infinity;
  }
  clear() { Object.assign(this, new Watched()); }

  // Milliseconds since the watching began, by this browser's clock.
  time() { return Math.max(performance.now() - this.offset, this.now); }

  /**
   * @param {Frame | Snapshot} frame
   * @param {number} at when it came, by this browser's clock
   */
  take(frame, at = performance.now()) {
    this.numFrames++;
    if (frame.kind === "snapshot") this.takeSnapshot(frame, at);
    else this.takeFrame(frame);
    this.offset = Math.min(this.offset + 0.2, at - frame.now); // clocks drift
    this.now = frame.now;
    this.gauges = frame.gauges;
    this.takeGauges(frame);
    if (this.numFrames % 30 === 0) this.forget();
  }

  /**
   * @param {Snapshot} frame
   * @param {number} at
   */
  takeSnapshot(frame, at) {
    this.numSnapshots++;
    const chosen = this.chosen?.id;
    this.clear();
    this.offset = at - frame.now;
    this.about = frame.about;
    this.shadow = frame.shadow;
    this.began = frame.now;
    for (const [came, state, reason, computed, output, cached, preemptions] of frame.requests) {
      const life = this.add(asCame(came), frame.now);
      Object.assign(life, { computed, output, cached, preemptions });
      if (reason) life.reasons.push({ step: 0, reason });
      if (state === "preempted" || state === "paused") life.enter(state, frame.now);
      if (state === "running") {
        const decodes = output > 0;
        life.enter(decodes ? "decode" : "prefill", frame.now);
        life.runLane = place(this.runLanes, life);
        if (!decodes) this.prefilling.add(life);
      }
    }
    this.rows = this.known(frame.rows);
    this.chosen = chosen ? this.byId.get(chosen) ?? null : null;
  }

  /**
   * Those of these numbers that are not forgotten.
   * @param {number[]} numbers
   */
  known(numbers) {
    const found = [];
    for (const number of numbers) {
      const life = this.lives.get(number);
      if (life) found.push(life);
    }
    return found;
  }

  /**
   * @param {ReturnType<typeof asCame>} came
   * @param {number} known
   */
  add(came, known) {
    const life = new Life(came, known);
    life.lane = place(this.lanes, life);
    this.lives.set(life.number, life);
    this.byId.set(life.id, life);
    if (this.own.has(life.id)) life.tokenSteps = [];
    return life;
  }

  /** @param {Frame} frame */
  takeFrame(frame) {
    const { came, planned, back, waits, ended, switched } = frame.events;
    if (came.length || planned.length || ended.length) this.lastEvent = frame.now;
    for (const row of came) this.add(asCame(row), row[6]);
    this.numCame += came.length;
    let i = 0;
    for (const row of planned) { // in order of time: a result comes before the plan that follows it
      while (i < back.length && back[i][1] <= row[1]) this.takeResult(back[i++]);
      this.takePlan(asPlanned(row));
    }
    while (i < back.length) this.takeResult(back[i++]);
    for (const [number, step, reason] of waits) this.lives.get(number)?.reasons.push({ step, reason });
    for (const [number, time, reason, output] of ended) {
      const life = this.lives.get(number);
      if (!life) continue;
      Object.assign(life, { end: time, finish: reason, output });
      life.enter("done", time);
      for (const chunk of life.chunks) chunk.to ??= time;
      this.prefilling.delete(life);
    }
    for (const [time, policy, options] of switched) {
      this.switches.push({ time, policy });
      Object.assign(this.about, { policy, options });
    }
    if (frame.shadow) this.shadow = frame.shadow;
  }

  /** @param {ReturnType<typeof asPlanned>} plan */
  takePlan(plan) {
    if (plan.joined.length || plan.left.length) {
      const left = new Set(plan.left);
      const joined = this.known(plan.joined);
      this.rows = this.rows.filter((life) => !left.has(life.number)).concat(joined);
      this.numRows += this.rows.length;
    }
    for (const number of plan.preempted) {
      const life = this.lives.get(number);
      if (!life) continue;
      life.preemptions++;
      life.enter("preempted", plan.time);
      this.prefilling.delete(life);
    }
    for (const number of plan.paused) {
      const life = this.lives.get(number);
      if (!life) continue;
      life.enter("paused", plan.time);
      this.prefilling.delete(life);
    }
    for (const [number, computed] of plan.admitted) {
      const life = this.lives.get(number);
      if (!life) continue;
      const goesOn = life.state === "paused";
      if (goesOn && life.output && computed >= life.prompt + life.output - 1) {
        life.enter("decode", plan.time);
        continue;
      }
      if (!life.preemptions && !goesOn) life.cached = computed;
      life.computed = computed;
      life.runLane ??= place(this.runLanes, life);
      life.enter("prefill", plan.time);
      this.prefilling.add(life);
    }
    const tokens = new Map();
    for (const [number, count] of plan.tokens) tokens.set(this.lives.get(number), count);
    let prefill = 0;
    /** @type {[Life, number][]} */
    const chunks = [];
    if (this.prefilling.size)
      for (const life of this.rows) {
        if (!this.prefilling.has(life)) continue;
        const chunk = { step: plan.id, from: plan.time, to: null, tokens: tokens.get(life) ?? 1 };
        life.chunks.push(chunk);
        life.computed += chunk.tokens;
        prefill += chunk.tokens;
        chunks.push([life, chunk.tokens]);
      }
    /** @type {Step} */
    const step = {
      id: plan.id, time: plan.time, back: null, total: plan.total, prefill, chunks,
      decode: plan.total - prefill, lives: this.rows, running: plan.running,
      waiting: plan.waiting, used: plan.used, preempted: plan.preempted.length,
      admitted: plan.admitted.map(([number]) => this.lives.get(number)),
      encoded: plan.encoded.reduce((sum, [, count]) => sum + count, 0), // tokens of images
    };
    this.steps.push(step);
    this.unanswered.set(step.id, step);
  }

  /** @param {import("./frames.js").Back} row */
  takeResult([id, time, counts]) {
    const step = this.unanswered.get(id);
    if (!step) return; // planned before we looked
    for (const [older] of this.unanswered) if (older <= id) this.unanswered.delete(older);
    step.back = time;
    const got = new Map(counts);
    for (const life of step.lives) {
      const count = got.size ? got.get(life.number) ?? 1 : 1;
      if (!count) continue;
      if (life.end === null) life.output += count;
      life.tokenSteps?.push(...Array(count).fill(step));
      if (this.prefilling.has(life)) {
        this.prefilling.delete(life);
        life.firstToken ??= time;
        life.enter("decode", time);
      }
    }
    for (const [life] of step.chunks) {
      const chunk = life.chunks.find((c) => c.step === id);
      if (chunk) chunk.to = time;
    }
  }

  /** @param {Frame | Snapshot} frame */
  takeGauges({ now, gauges }) {
    const { num_used_blocks: used, num_leased_blocks: leased, num_cached_blocks: cached } = gauges;
    const last = this.kv.at(-1);
    if (last?.used !== used || last.leased !== leased || last.cached !== cached)
      this.kv.push({ time: now, used, leased, cached });
    this.recent.push({
      time: now, tokens: gauges.num_output_tokens, lag: gauges.loop_lag, gaps: gauges.gaps,
      firstTokens: gauges.first_tokens,
    });
  }

  forget() {
    const before = this.lastEvent - KEPT_MS;
    for (const [number, life] of this.lives)
      if (life.end !== null && life.end < before && life !== this.chosen) {
        this.lives.delete(number);
        if (this.byId.get(life.id) === life) this.byId.delete(life.id);
      }
    while (this.steps.length > MAX_STEPS || (this.numRows > MAX_ROWS && this.steps.length > 1)) {
      const rows = new Set(this.steps.splice(0, 1000).map((step) => step.lives));
      rows.delete(this.steps[0]?.lives); // steps share them
      for (const lives of rows) this.numRows -= lives.length;
    }
    const firstKv = this.kv.findLastIndex(({ time }) => time <= before); // it holds until the next
    if (firstKv > 0) this.kv.splice(0, firstKv);
    dropBefore(this.switches, before);
    dropBefore(this.recent, this.now - RECENT_MS);
  }

  // Of the last ten seconds.
  measures() {
    const since = this.now - RECENT_MS;
    const recent = this.recent.filter(({ time }) => time >= since);
    /** @type {[number, number][]} */
    const gaps = [], /** @type {[number, number][]} */ firstTokens = [];
    let lag = 0;
    for (const one of recent) {
      gaps.push(...one.gaps);
      for (const ms of one.firstTokens) firstTokens.push([ms, 1]);
      if (one.time >= this.now - 1500) lag = Math.max(lag, one.lag);
    }
    const speed = recent.filter(({ time }) => time >= this.now - 3000);
    const first = speed[0], last = speed[speed.length - 1];
    const isFlowing = speed.length > 1 && last.time > first.time;
    return {
      tokensPerSecond: isFlowing ? (1e3 * (last.tokens - first.tokens)) / (last.time - first.time) : 0,
      lag,
      gap: [percentile(gaps, 0.5), percentile(gaps, 0.99)],
      firstToken: [percentile(firstTokens, 0.5), percentile(firstTokens, 0.99)],
    };
  }

  // Requests that can be seen between two times, in order of arrival.
  /**
   * @param {number} from
   * @param {number} to
   */
  between(from, to) {
    const found = [];
    for (const life of this.lives.values())
      if ((life.end === null || life.end >= from) && life.spans[0].from <= to) found.push(life);
    return found;
  }
}

// The first free lane of the same user; else one that has been free for long, or a new one.
/**
 * @param {Life[]} lanes
 * @param {Life} life
 */
function place(lanes, life) {
  let free = lanes.findIndex((last) => last.end !== null && last.user === life.user);
  const since = lanes.length < MAX_OWN_LANES ? life.arrival - REUSED_MS : Infinity;
  if (free < 0) free = lanes.findIndex((last) => last.end !== null && last.end < since);
  const lane = free < 0 ? lanes.length : free;
  lanes[lane] = life;
  return lane;
}

/**
 * @param {{ time: number }[]} list
 * @param {number} when
 */
function dropBefore(list, when) {
  const first = list.findIndex(({ time }) => time >= when);
  list.splice(0, first < 0 ? list.length : first);
}

// The smallest value that at least that share of [value, count] does not exceed.
/**
 * @param {[number, number][]} pairs
 * @param {number} share
 */
function percentile(pairs, share) {
  if (!pairs.length) return null;
  pairs.sort((a, b) => a[0] - b[0]);
  let left = 0;
  for (const [, count] of pairs) left += count;
  left *= share;
  for (const [value, count] of pairs) if ((left -= count) <= 1e-9) return value;
  return pairs[pairs.length - 1][0];
}

// The percentile of a histogram: the upper bound of its bucket, in seconds; null of nothing.
/**
 * @param {number[]} bounds
 * @param {number[]} counts
 * @param {number} share
 */
export function bucketPercentile(bounds, counts, share) {
  let left = counts.reduce((sum, count) => sum + count, 0) * share;
  if (!left) return null;
  for (let i = 0; i < counts.length; i++) if ((left -= counts[i]) <= 1e-9) return bounds[i] ?? Infinity;
  return Infinity;
}
