// Chat: talks to the model, and colours each token by the step that made it.
// @ts-check

import { dress } from "./markdown.js";
import { Refusal, events, get } from "./server.js";
import { byId, duration, element, plural } from "./words.js";

const COLOURS = 6;
const ENDS = { stop: "The reply is complete.", tool_calls: "The model calls a tool, which this chat does not run." };

export class Chat {
  /** @param {import("./story.js").Story} story */
  constructor(story) {
    this.story = story;
    this.messages = [];
    /** @type {AbortController | null} */
    this.running = null;
    this.tokens = []; // nodes {request, from, until} that have no colour yet
    this.sampling = null; // what the model recommends, once it is known
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
        if (target.closest(".token")) this.explain(target.closest(".token"));
      });
  }

  hint() {
    byId("talk").replaceChildren(element("p", { class: "hint" }, "A small chat, to see the words of a reply come step by step."));
    byId("token").textContent = "A change of colour is another step. Point at a word to see which.";
  }

  onSnapshot() {
    this.tokens = [];
    if (!this.sampling) this.showSampling();
  }

  // What the server takes for fields that are left empty.
  async showSampling() {
    try {
      const { data } = await get("v1/models");
      this.sampling = data.find(({ id }) => id === this.story.about.model)?.sampling ?? {};
    } catch {
      return; // on another port, or for holders of a key: then nothing is promised
    }
    byId("temperature").placeholder = this.sampling.temperature ?? "1";
    byId("temperature").title = this.sampling.temperature === null ? "Empty: 1, the protocol's; the model recommends none." : "Empty: what the model recommends.";
  }

  async send() {
    const text = byId("prompt").value.trim() || byId("prompt").placeholder;
    byId("prompt").value = "";
    if (!this.messages.length || byId("as-text").checked) this.forget(0);
    this.add("user", text);
    await this.answer();
  }

  // The messages from that one on, and what stands for them.
  forget(index) {
    this.messages.length = Math.min(this.messages.length, index);
    const shown = [...byId("talk").children];
    for (const node of shown) if (!(Number(node.dataset.message) < index)) node.remove();
  }

  add(role, content) {
    const index = this.messages.push({ role, content }) - 1;
    return this.say(role, content, index);
  }

  edit(index, isRefused = false) {
    if (this.running && !isRefused) return;
    byId("prompt").value = this.messages[index].content;
    this.forget(index);
    byId("prompt").focus();
  }

  async again(index) {
    if (this.running) return;
    this.forget(index);
    await this.answer();
  }

  async answer() {
    const isText = byId("as-text").checked;
    const index = this.messages.length;
    const reply = this.say("assistant", "", index);
    const digits = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0"));
    const id = `page-${digits.join("")}`;
    const shown = `page-${digits.slice(0, 4).join("")}`; // as frames name it
    this.story.own.add(shown);
    const tokens = Number(byId("max-tokens").value), temperature = byId("temperature").value;
    const value = {
      stream: true, stream_options: { continuous_usage_stats: true }, request_id: id,
      ...(tokens && { max_tokens: tokens }), ...(temperature !== "" && { temperature: Number(temperature) }),
      ...(isText ? { prompt: this.messages.at(-1).content } : { messages: this.messages }),
    };
    const running = this.running = new AbortController();
    byId("send").textContent = "Stop";
    this.status("");
    const told = { content: "", thought: false, finish: null, numTokens: 0 };
    try {
      await this.read(isText ? "v1/completions" : "v1/chat/completions", value, reply, shown, told, running.signal);
      this.status(ENDS[told.finish] ?? `The reply has ended: ${told.finish}.`);
      if (told.finish === "length")
        this.status(`The reply was cut after ${plural(told.numTokens, "token")}: “Tokens” allows more.`);
    } catch (error) {
      const isStopped = error.name === "AbortError";
      const isRefused = error instanceof Refusal;
      this.status(isStopped ? "Stopped." : error.message, !isStopped);
      if (isRefused && error.status === 404)
        this.status("Models are served on another port: this one is the operators'.", true);
      if (isRefused && /template/.test(error.message))
        this.status(`${error.message}. Tick “continue my text” instead.`, true);
      if (isRefused) this.edit(index - 1, true);
    }
    if (reply.childElementCount) this.finish(reply, told, index, isText);
    else reply.closest("div")?.remove();
    this.running = null;
    byId("send").textContent = "Send";
  }

  // Of a reply, its content alone becomes history: what the model thought does not.
  finish(reply, { content }, index, isText) {
    if (this.messages.length !== index) return; // it was cleared meanwhile
    if (content) this.messages.push({ role: "assistant", content });
    if (!isText) dress([...reply.querySelectorAll(".token:not(.thought)")]);
  }

  async read(path, value, reply, shown, told, signal) {
    let index = 0;
    for await (const chunk of events(path, { value, signal })) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices?.[0];
      const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
      const text = choice?.text ?? choice?.delta?.content ?? "";
      const until = chunk.usage?.completion_tokens ?? index;
      told.finish = choice?.finish_reason ?? told.finish;
      told.numTokens = Math.max(until, told.numTokens);
      told.content += text;
      for (const [words, name] of [[thought, "token thought"], [text, "token"]]) {
        if (!words) continue;
        const node = element("span", { class: name }, words);
        this.tokens.push(Object.assign(node, { request: shown, from: index, until }));
        const talk = byId("talk");
        const isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
        reply.append(node);
        if (isAtEnd) talk.scrollTop = talk.scrollHeight;
        index = until;
      }
    }
  }

  say(role, text, index) {
    const words = element("p", {}, text);
    const isUser = role === "user";
    byId("talk").querySelector(".hint")?.remove();
    byId("talk").append(element("div", { "data-message": String(index) },
      element("div", { class: "actions" }, element("span", { class: "who" }, isUser ? "you" : "the model"),
        element("button", { type: "button", class: "plain", onclick: () => (isUser ? this.edit(index) : this.again(index)) }, isUser ? "Edit" : "Again")),
      words));
    byId("talk").scrollTop = byId("talk").scrollHeight;
    return words;
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
