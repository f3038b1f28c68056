// Traffic: sixty requests of mixed kinds, so that there is something to look at.
// A browser opens six connections to one server, so each one carries several prompts.
// @ts-check

import { Refusal, events } from "./server.js";
import { byId, plural } from "./words.js";

const WORDS = ("the of and to a in that is was for on with as by at from or an be this which not are "
  + "king ship river winter market letter road night garden bread stone window horse summer paper "
  + "count walk speak carry build find keep turn wait send read late early small long quiet open").split(" ");

// By connection, one after the other. Each kind is a user of its own: its lanes have that name.
/** @typedef {{ user: string, prompts: number, words: number, tokens: number, leaves?: boolean }} Kind */
/** @type {Kind[][]} */
const CONNECTIONS = [
  [{ user: "long replies", prompts: 16, words: 12, tokens: 160 }],
  [0, 1, 2].map(() => ({ user: "short questions", prompts: 8, words: 16, tokens: 24 })),
  [0, 1].map(() => ({ user: "long prompts", prompts: 6, words: 420, tokens: 12 })),
  [{ user: "leave early", prompts: 8, words: 40, tokens: 400, leaves: true }],
];
export const NUM_REQUESTS = CONNECTIONS.flat().reduce((sum, { prompts }) => sum + prompts, 0);
const APART_MS = 60; // between the beginnings of two connections

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const text = (count) => Array.from({ length: count }, () => WORDS[Math.floor(WORDS.length * Math.random())]).join(" ");

export class Traffic {
  /** @param {import("./story.js").Story} story */
  constructor(story) {
    this.story = story;
    /** @type {AbortController | null} */
    this.running = null;
    this.buttons = [...document.querySelectorAll("button.traffic")];
    this.status = byId("traffic-status");
    for (const button of this.buttons)
      button.addEventListener("click", () => (this.running ? this.running.abort() : this.run()));
  }

  say(words, isBad = false) {
    this.status.textContent = words;
    this.status.classList.toggle("bad", isBad);
  }

  async run() {
    const running = this.running = new AbortController();
    for (const button of this.buttons) button.textContent = "Stop sending";
    this.say(`${plural(NUM_REQUESTS, "request")} of four kinds are on their way.`);
    try {
      await Promise.all(CONNECTIONS.map(async (kinds, i) => {
        await pause(i * APART_MS);
        for (const kind of kinds) await this.send(kind, running.signal);
      }));
      this.say(`${plural(NUM_REQUESTS, "request")} were sent and have ended. Eight of them left before their end, on purpose.`);
    } catch (error) {
      const isStopped = running.signal.aborted && !(error instanceof Refusal);
      running.abort(); // the others would go on alone
      const isElsewhere = error instanceof Refusal && error.status === 404;
      if (isStopped) this.say("Stopped: the requests that ran are aborted.");
      else this.say(isElsewhere ? "Models are served on another port: send requests there." : error.message, true);
    }
    this.running = null;
    for (const button of this.buttons) button.textContent = "Send sixty requests";
  }

  /**
   * The replies are read and not kept.
   * @param {Kind} kind
   * @param {AbortSignal} stop
   */
  async send({ user, prompts, words, tokens, leaves }, stop) {
    const own = new AbortController();
    const signal = AbortSignal.any([own.signal, stop]);
    const longest = Math.floor((this.story.about?.max_model_len ?? 1024) / 6); // in words
    const value = {
      stream: true, user, max_tokens: Math.min(tokens, 2 * longest), ignore_eos: true,
      prompt: Array.from({ length: prompts }, () => text(Math.min(words, longest))),
    };
    let pieces = 0;
    try {
      for await (const chunk of events("v1/completions", { value, signal })) {
        if (chunk.error) throw new Error(chunk.error.message);
        if (leaves && ++pieces > 4 * prompts) own.abort();
      }
    } catch (error) {
      if (!own.signal.aborted || stop.aborted) throw error;
    }
  }
}
