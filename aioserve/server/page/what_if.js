// What if: another policy on the live requests, and the one that runs in their shadow.

import { Refusal, post } from "./server.js";
import { bucketPercentile } from "./story.js";
import { count, duration, element } from "./words.js";

const byId = (id) => document.getElementById(id);

export class WhatIf {
  constructor(story) {
    this.story = story;
    this.first = null; // the shadow's counts when we came
    byId("switch").addEventListener("submit", (event) => {
      event.preventDefault();
      this.switch();
    });
    byId("policies").addEventListener("change", () => this.describe());
  }

  onSnapshot() {
    const { policies, policy, options } = this.story.about;
    const names = Object.keys(policies);
    if (!names.includes(policy)) names.unshift(policy);
    byId("policies").replaceChildren(...names.map((name) => new Option(name, name, false, name === policy)));
    byId("options").value = Object.keys(options).length ? JSON.stringify(options) : "";
    this.first = null;
    this.describe();
    this.words();
  }

  describe() {
    byId("policy-words").textContent = this.story.about.policies[byId("policies").value] ?? "";
  }

  options() {
    const text = byId("options").value.trim();
    if (!text) return {};
    let options;
    try {
      options = JSON.parse(text);
    } catch {
      throw new Error(`options must be a JSON object, as {"chunk_size": 64}, not ${text}`);
    }
    if (typeof options !== "object" || options === null || Array.isArray(options))
      throw new Error(`options must be a JSON object, as {"chunk_size": 64}, not ${text}`);
    return options;
  }

  async switch() {
    const status = byId("switch-status");
    status.classList.remove("bad");
    byId("do-switch").disabled = true;
    try {
      const policy = byId("policies").value;
      const { before } = await post("admin/policy", { policy, options: this.options() });
      status.textContent = `${policy} decides from the next step on; before, it was ${before.policy}.`;
    } catch (error) {
      status.classList.add("bad");
      const isOff = error instanceof Refusal && error.status === 404;
      status.textContent = isOff ? "This server was started without --enable-admin: its policy cannot be switched from here." : error.message;
    } finally {
      byId("do-switch").disabled = false;
    }
  }

  words() {
    const { shadow, about } = this.story;
    if (!shadow) {
      if (!byId("shadow").childElementCount)
        byId("shadow").append(element("p", { class: "small" }, "None: start the server with --shadow-policy NAME, and a second policy follows the live requests in virtual time."));
      return;
    }
    if (shadow === this.drawn) return;
    this.drawn = shadow;
    this.first ??= shadow;
    const since = (side, name) => shadow[side][name].map((total, i) => total - this.first[side][name][i]);
    const rows = [["first token", "first_token"], ["gap", "gap"], ["whole request", "whole"]].flatMap(([label, name]) =>
      [["p50", 0.5], ["p99", 0.99]].map(([percent, share]) => element("tr", {},
        element("th", { scope: "row" }, `${label} ${percent}`),
        ...["live", "shadow"].map((side) => {
          const value = bucketPercentile(shadow.bounds, since(side, name), share);
          return element("td", {}, value === null ? "–" : `≤ ${duration(1e3 * value)}`);
        }))));
    rows.push(element("tr", {}, element("th", { scope: "row" }, "running, waiting"),
      element("td", {}, `${count(this.story.gauges.num_running)}, ${count(this.story.gauges.num_waiting)}`),
      element("td", {}, `${count(shadow.num_running)}, ${count(shadow.num_waiting)}`)));
    const words = shadow.is_failed ? "Its policy has raised: it is off." : `${shadow.policy} follows the live ${about.policy} five seconds behind, in virtual time. Counted since this page was opened, in buckets.`;
    byId("shadow").replaceChildren(
      element("div", { class: "scroll shadow" }, element("table", {},
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, ""), element("th", { scope: "col" }, "live"), element("th", { scope: "col" }, "shadow"))),
        element("tbody", {}, ...rows))),
      element("p", { class: shadow.is_failed ? "small bad" : "small" }, words + (shadow.num_resets ? ` It was too far behind ${count(shadow.num_resets)} times and began anew.` : "")));
  }
}
