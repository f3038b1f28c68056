// What is known of requests and steps: built up from the frames of the stream.
// Knows times in milliseconds since the watching began; knows no network and nothing that is drawn.

const MAX_STEPS = 20000;
const MAX_ROWS = 4e6; // references in all steps that are kept: 32 MB
const KEPT_MS = 65000; // requests that ended longer before the last event are forgotten
const RECENT_MS = 10000; // what percentiles are of
const REUSED_MS = 20000; // after which another user may have a lane
const MAX_OWN_LANES = 100; // of more, another user has one at once

// The rows of frames, by their fields: aioserve/engine/observe/frames.py.
const asCame = ([number, id, user, priority, prompt, max, arrival]) =>
  ({ number, id, user, priority, prompt, max, arrival });
const asPlanned = ([id, time, joined, left, tokens, admitted, preempted, total, running, waiting, used, encoded]) =>
  ({ id, time, joined, left, tokens, admitted, preempted, total, running, waiting, used, encoded });

class Life {
  constructor(came, known) {
    Object.assign(this, came);
    this.lane = this.runLane = null; // among all, and among those who ran
    this.state = "queued"; // queued, prefill, decode, preempted, done
    this.reasons = []; // {step, reason}: from that step on
    this.spans = [{ kind: "queued", from: came.arrival, to: null }];
    this.chunks = []; // of its prompt: {step, from, to, tokens}
    this.computed = this.cached = this.output = this.preemptions = 0;
    this.firstToken = this.end = null;
    this.finish = "";
    this.tokenSteps = null; // of an own one: the step of each token
    this.known = known; // since when we look
  }
  get reason() {
    return this.reasons.length ? this.reasons[this.reasons.length - 1].reason : "";
  }
  get waits() { return this.state === "queued" || this.state === "preempted"; }
  reasonAt(step) {
    let found = "";
    for (const change of this.reasons) {
      if (change.step > step) break;
      found = change.reason;
    }
    return found;
  }
  enter(state, time) {
    this.state = state;
    const last = this.spans[this.spans.length - 1];
    if (last.kind === state) return;
    last.to = time;
    if (state !== "done") this.spans.push({ kind: state, from: time, to: null });
  }
  seconds(kind, now) { // spent so far, in milliseconds
    let sum = 0;
    for (const span of this.spans)
      if (span.kind === kind) sum += (span.to ?? this.end ?? now) - span.from;
    return sum;
  }
}

export class Story {
  constructor() {
    this.own = new Set(); // requests of this page, by the ids that frames show
    this.chosen = null;
    this.numFrames = this.numSnapshots = 0;
    this.numCame = 0; // requests, while this page looked
    this.offset = Infinity;
    this.clear();
  }
  clear() {
    this.about = this.gauges = this.shadow = null;
    this.lives = new Map(); // by number, in order of arrival
    this.lanes = []; // who has each, last: a lane is used again
    this.runLanes = [];
    this.byId = new Map();
    this.steps = []; // with those who were in them
    this.unanswered = new Map(); // steps that are not back, by id
    this.rows = []; // of the last step: lives
    this.numRows = 0;
    this.prefilling = new Set();
    this.switches = [];
    this.kv = []; // {time, used, cached}: from then on
    this.recent = []; // {time, tokens, lag, gaps, firstTokens}
    this.began = 0;
    this.lastEvent = 0; // when something came, ran or ended
    this.now = 0;
  }

  // Milliseconds since the watching began, by this browser's clock.
  time() { return Math.max(performance.now() - this.offset, this.now); }

  // `at`: when it came, by this browser's clock.
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
      if (state === "preempted") life.enter("preempted", frame.now);
      if (state === "running") {
        const decodes = output > 0;
        life.enter(decodes ? "decode" : "prefill", frame.now);
        life.runLane = place(this.runLanes, life);
        if (!decodes) this.prefilling.add(life);
      }
    }
    this.rows = frame.rows.map((number) => this.lives.get(number)).filter(Boolean);
    this.chosen = chosen ? this.byId.get(chosen) ?? null : null;
  }

  add(came, known) {
    const life = new Life(came, known);
    life.lane = place(this.lanes, life);
    this.lives.set(life.number, life);
    this.byId.set(life.id, life);
    if (this.own.has(life.id)) life.tokenSteps = [];
    return life;
  }

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

  takePlan(plan) {
    if (plan.joined.length || plan.left.length) {
      const left = new Set(plan.left);
      const joined = plan.joined.map((number) => this.lives.get(number)).filter(Boolean);
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
    for (const [number, computed] of plan.admitted) {
      const life = this.lives.get(number);
      if (!life) continue;
      if (!life.preemptions) life.cached = computed;
      life.computed = computed;
      life.runLane ??= place(this.runLanes, life);
      life.enter("prefill", plan.time);
      this.prefilling.add(life);
    }
    const tokens = new Map();
    for (const [number, count] of plan.tokens) tokens.set(this.lives.get(number), count);
    let prefill = 0;
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

  takeGauges({ now, gauges }) {
    const [used, cached] = [gauges.num_used_blocks, gauges.num_cached_blocks];
    const last = this.kv.at(-1);
    if (last?.used !== used || last.cached !== cached) this.kv.push({ time: now, used, cached });
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
    const gaps = [], firstTokens = [];
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

  // Those who can be seen between two times, in order of arrival.
  between(from, to) {
    const found = [];
    for (const life of this.lives.values())
      if ((life.end === null || life.end >= from) && life.spans[0].from <= to) found.push(life);
    return found;
  }
}

// The first free lane of the same user; else one that has been free for long, or a new one.
function place(lanes, life) {
  let free = lanes.findIndex((last) => last.end !== null && last.user === life.user);
  const since = lanes.length < MAX_OWN_LANES ? life.arrival - REUSED_MS : Infinity;
  if (free < 0) free = lanes.findIndex((last) => last.end !== null && last.end < since);
  const lane = free < 0 ? lanes.length : free;
  lanes[lane] = life;
  return lane;
}

function dropBefore(list, when) {
  const first = list.findIndex(({ time }) => time >= when);
  list.splice(0, first < 0 ? list.length : first);
}

// The smallest value that at least that share of [value, count] does not exceed.
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
export function bucketPercentile(bounds, counts, share) {
  let left = counts.reduce((sum, count) => sum + count, 0) * share;
  if (!left) return null;
  for (let i = 0; i < counts.length; i++) if ((left -= counts[i]) <= 1e-9) return bounds[i] ?? Infinity;
  return Infinity;
}
