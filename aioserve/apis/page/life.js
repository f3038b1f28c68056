// What is known of one request: where it stood when, and why it waited.
// Knows times in milliseconds since the watching began; knows no other request.
// @ts-check

/** @typedef {"queued" | "prefill" | "decode" | "preempted" | "paused" | "done"} State */
/** @typedef {{ kind: State, from: number, to: number | null }} Span */
/** @typedef {{ step: number, from: number, to: number | null, tokens: number }} Chunk */
/** @typedef {{ id: number, time: number, back: number | null, total: number, prefill: number,
 * chunks: [Life, number][], decode: number, lives: Life[], running: number, waiting: number,
 * used: number, preempted: number, admitted: (Life | undefined)[], encoded: number }} Step */

// The rows of frames, by their fields: aioserve/engine/live_feed.py.

/** @param {import("./frames.js").Came} row */
export const asCame = ([number, id, user, priority, prompt, max, arrival]) =>
  ({ number, id, user, priority, prompt, max, arrival });

export class Life {
  /**
   * @param {ReturnType<typeof asCame>} came
   * @param {number} known
   */
  constructor(came, known) {
    this.number = came.number;
    this.id = came.id;
    this.user = came.user;
    this.priority = came.priority;
    this.prompt = came.prompt;
    this.max = came.max;
    this.arrival = came.arrival;
    /** @type {number | null} */
    this.lane = null; // among all
    /** @type {number | null} */
    this.runLane = null; // among requests that ran
    /** @type {State} */
    this.state = "queued";
    /** @type {{ step: number, reason: string }[]} */
    this.reasons = []; // each from that step on
    /** @type {Span[]} */
    this.spans = [{ kind: "queued", from: came.arrival, to: null }];
    /** @type {Chunk[]} */
    this.chunks = []; // of its prompt
    this.computed = this.cached = this.output = this.preemptions = 0;
    /** @type {number | null} */
    this.firstToken = null;
    /** @type {number | null} */
    this.end = null;
    this.finish = "";
    /** @type {Step[] | null} */
    this.tokenSteps = null; // of an own one: the step of each token
    this.known = known; // since when we look
  }
  get reason() {
    return this.reasons.length ? this.reasons[this.reasons.length - 1].reason : "";
  }
  get waits() { return ["queued", "preempted", "paused"].includes(this.state); }
  /** @param {number} step */
  reasonAt(step) {
    let found = "";
    for (const change of this.reasons) {
      if (change.step > step) break;
      found = change.reason;
    }
    return found;
  }
  /**
   * @param {State} state
   * @param {number} time
   */
  enter(state, time) {
    this.state = state;
    const last = this.spans[this.spans.length - 1];
    if (last.kind === state) return;
    last.to = time;
    if (state !== "done") this.spans.push({ kind: state, from: time, to: null });
  }
  /**
   * @param {State} kind
   * @param {number} now
   */
  seconds(kind, now) { // spent so far, in milliseconds
    let sum = 0;
    for (const span of this.spans)
      if (span.kind === kind) sum += (span.to ?? this.end ?? now) - span.from;
    return sum;
  }
  /** @param {number} now */
  waited(now) { return this.seconds("queued", now) + this.seconds("preempted", now) + this.seconds("paused", now); }
}
