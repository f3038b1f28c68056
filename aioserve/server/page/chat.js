// Chat: talks to the model, and colours each token by the step that made it.

import { Refusal, events } from "./server.js";
import { duration, element, plural } from "./words.js";

const COLOURS = 6;
const byId = (id) => document.getElementById(id);

export class Chat {
  constructor(story) {
    this.story = story;
    this.messages = [];
    this.running = null;
    this.tokens = []; // nodes {request, from, until} that have no colour yet
    this.lastStatus = "";
    this.hint();
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.send();
    });
    byId("clear").addEventListener("click", () => {
      this.running?.abort();
      this.messages = [];
      this.hint();
    });
    for (const event of ["pointerover", "click"])
      byId("talk").addEventListener(event, ({ target }) => {
        if (target.classList.contains("token")) this.explain(target);
      });
  }

  hint() {
    byId("talk").replaceChildren(element("p", { class: "hint" }, "Say something, and watch its lane."));
    byId("token").textContent = "A change of colour is another step. Point at a word to see which.";
  }

  async send() {
    const text = byId("prompt").value.trim() || byId("prompt").placeholder;
    byId("prompt").value = "";
    if (!this.messages.length) byId("talk").replaceChildren();
    const isText = byId("as-text").checked;
    if (isText) this.messages = [];
    this.messages.push({ role: "user", content: text });
    this.say("you", text);
    const reply = this.say("the model", "");
    const digits = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0"));
    const id = `page-${digits.join("")}`;
    const shown = `page-${digits.slice(0, 4).join("")}`; // as frames name it
    this.story.own.add(shown);
    const value = {
      stream: true, stream_options: { continuous_usage_stats: true }, request_id: id,
      max_tokens: Number(byId("max-tokens").value) || 64,
      temperature: Number(byId("temperature").value),
      ...(isText ? { prompt: text } : { messages: this.messages }),
    };
    this.running = new AbortController();
    byId("send").textContent = "Stop";
    this.status("");
    let answer = "";
    try {
      answer = await this.read(isText ? "v1/completions" : "v1/chat/completions", value, reply, shown);
      this.status("The answer is complete.");
    } catch (error) {
      const isStopped = error.name === "AbortError";
      const isRefused = error instanceof Refusal;
      this.status(isStopped ? "Stopped." : error.message, !isStopped);
      if (isRefused && error.status === 404)
        this.status("Models are served on another port: this one is the operators'.", true);
      if (isRefused && /template/.test(error.message))
        this.status(`${error.message}. Tick "go on with the text" instead.`, true);
      if (!reply.textContent) reply.closest("p").remove();
      if (isRefused) this.messages.pop();
    }
    if (answer) this.messages.push({ role: "assistant", content: answer });
    this.running = null;
    byId("send").textContent = "Send";
  }

  async read(path, value, reply, shown) {
    let answer = "", index = 0;
    for await (const chunk of events(path, { value, signal: this.running.signal })) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices?.[0];
      const text = choice?.text ?? choice?.delta?.content ?? choice?.delta?.reasoning_content ?? "";
      const until = chunk.usage?.completion_tokens ?? index;
      if (text) {
        answer += text;
        const node = element("span", { class: "token" }, text);
        this.tokens.push(Object.assign(node, { request: shown, from: index, until }));
        const talk = byId("talk");
        const isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
        reply.append(node);
        if (isAtEnd) talk.scrollTop = talk.scrollHeight;
        index = until;
      }
    }
    return answer;
  }

  say(who, text) {
    const span = element("span", {}, text);
    byId("talk").append(element("p", {}, element("span", { class: "who" }, who), span));
    byId("talk").scrollTop = byId("talk").scrollHeight;
    return span;
  }

  status(words, isBad = false) {
    byId("chat-status").textContent = words;
    byId("chat-status").classList.toggle("bad", isBad);
  }

  // The frames come a little after the words.
  onFrame() {
    if (!this.tokens.length) return;
    this.tokens = this.tokens.filter((node) => {
      const life = this.story.byId.get(node.request);
      const step = life?.tokenSteps?.[Math.max(node.until - 1, node.from)];
      if (!step) return node.isConnected;
      node.step = step;
      node.life = life;
      node.classList.add(`s${step.id % COLOURS}`);
      node.dataset.step = step.id;
      return false;
    });
  }

  onSnapshot() { this.tokens = []; }

  explain(node) {
    const { step, life } = node;
    if (!step) return;
    const others = step.lives.length - 1;
    const words = [
      `“${node.textContent.trim() || "a space"}” came from step ${step.id}`,
      `${duration(step.back - step.time)}, ${duration(step.back - life.arrival)} after you asked`,
      others ? `with ${plural(others, "other request")} and ${plural(step.total, "token")} in it` : "alone",
    ];
    if (step.prefill) words.push(`${plural(step.prefill, "token")} of prompts`);
    byId("token").textContent = `${words.join(" · ")}.`;
  }
}
