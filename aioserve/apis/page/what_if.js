// What if: another policy on the live requests, and the one that runs in their shadow.
// @ts-check

import { post } from "./server.js";
import { bucketPercentile } from "./story.js";
import { byId, count, duration, element, plural } from "./words.js";

const ENOUGH = 50; // requests: of fewer a percentile is a matter of luck
// Of upper bounds of buckets: what lies in one bucket cannot be told apart.
const verdict = (live, shadow) => (live === null || shadow === null ? "–" : shadow < live ? "shorter" : shadow > live ? "longer" : "as long");

export class WhatIf {
  /** @param {import("./story.js").Story} story */
  constructor(story) {
    this.story = story;
    this.first = null; // the shadow's counts when we came
    byId("switch").addEventListener("submit", (event) => {
      event.preventDefault();
      this.switch();
    });
    this.trying = null;
    byId("try").addEventListener("click", () => (this.trying ? this.trying.abort() : this.try()));
    if (document.body.classList.contains("no-trials"))
      for (const button of ["try", "do-switch"]) byId(button).disabled = true;
    byId("report-close").addEventListener("click", () => { byId("report").hidden = true; });
    byId("policies").addEventListener("change", () => {
      this.showOptions(); // those of another policy would be refused
      this.describe();
    });
  }

  onSnapshot() {
    const { policies, policy } = this.story.about;
    const names = Object.keys(policies);
    if (!names.includes(policy)) names.unshift(policy);
    const select = byId("policies");
    const other = ["fcfs", "chunked_prefill", ...names].find((name) => name !== policy && names.includes(name)) ?? policy;
    const chosen = select.childElementCount && ["", ...names].includes(select.value) ? select.value : other;
    select.replaceChildren(...names.map((name) => new Option(name, name)), new Option("a file or module", ""));
    select.value = chosen;
    this.showOptions();
    this.first = null;
    this.describe();
    this.words();
  }

  policy() { return byId("policies").value || byId("policy-file").value.trim(); }

  // A field for each option that the policy's source declares; else, or for a file, JSON.
  showOptions() {
    const { policy, options, policy_options: known } = this.story.about;
    const chosen = byId("policies").value;
    byId("policy-file").closest("label").hidden = chosen !== "";
    const given = chosen === policy ? options : {};
    const fields = known[chosen] ?? [];
    const isCovered = fields.length && Object.keys(given).every((name) => fields.some(([known]) => known === name));
    byId("option-fields").replaceChildren(...(isCovered ? fields.map((field) => this.field(field, given)) : []));
    byId("options").closest("p").hidden = Boolean(isCovered);
    byId("options").value = !isCovered && Object.keys(given).length ? JSON.stringify(given) : "";
  }

  field([name, standard, note], given) {
    const inWords = (value) => (typeof value === "string" ? value : JSON.stringify(value));
    const isBool = typeof standard === "boolean";
    const input = isBool
      ? element("select", { name }, new Option(`${standard}, by default`, ""), new Option(String(!standard), String(!standard)))
      : element("input", { name, placeholder: standard === null ? "default" : inWords(standard), spellcheck: "false" });
    if (name in given) input.value = isBool && given[name] === standard ? "" : inWords(given[name]);
    return element("label", { title: note }, element("span", {}, name), input);
  }

  describe() {
    byId("policy-words").textContent = byId("policies").value
      ? this.story.about.policies[byId("policies").value] ?? ""
      : "A file on the server, which is read anew each time, or package.module:Class.";
  }

  options() {
    if (byId("options").closest("p").hidden)
      return Object.fromEntries([...byId("option-fields").querySelectorAll("input, select")]
        .filter((input) => input.value.trim()).map((input) => [input.name, parsed(input.value.trim())]));
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

  isLive(policy, options) {
    const { about } = this.story;
    const inOrder = (values) => JSON.stringify(Object.entries(values).sort());
    return policy === about.policy && inOrder(options) === inOrder(about.options);
  }

  say(words, isBad = false) {
    byId("switch-status").textContent = words;
    byId("switch-status").classList.toggle("bad", isBad);
  }

  async switch() {
    byId("do-switch").disabled = true;
    try {
      const policy = this.policy();
      const { before } = await post("admin/policy", { policy, options: this.options() });
      this.say(`${policy} decides from the next step on; before, it was ${before.policy}.`);
    } catch (error) {
      this.say(error.message, true);
    } finally {
      byId("do-switch").disabled = false;
    }
  }

  // Records, has both policies simulated, and shows the report.
  async try() {
    this.trying = new AbortController();
    byId("try").textContent = "Stop";
    const policy = this.policy(), seconds = Number(byId("seconds").value), requests = Number(byId("requests").value);
    const before = this.story.numCame, begun = performance.now();
    const clock = setInterval(() => { // what is read aloud is said once: the button counts
      const came = this.story.numCame - before;
      const left = Math.ceil(seconds - (performance.now() - begun) / 1e3);
      const isOver = left <= 0 || came >= requests;
      byId("try").textContent = isOver ? "Stop" : `Stop (${count(came)} of ${count(requests)}, ${left} s)`;
      if (isOver) this.say("Simulating what was recorded under both policies.");
    }, 500);
    try {
      const value = { policy, options: this.options(), seconds, requests };
      if (this.isLive(policy, value.options))
        throw new Error(`${policy} with these options is what runs now: choose another policy, or change an option.`);
      this.say(`Recording until ${plural(requests, "request")} came, for ${plural(seconds, "second")} at most. “Send sixty requests” makes some.`);
      const trial = await post("admin/try_policy", value, this.trying.signal);
      this.say(`${trial.on_these_requests[0]} The numbers are exact for the simulation of these ${plural(trial.requests, "request")}; the full comparison is below. ${trial.missing
        ? `Whether it holds for other traffic is open: intervals need ${plural(trial.missing, "request")} more.`
        : trial.has_intervals
          ? "Whether it holds for other traffic is in the intervals: better and worse are said where one leaves out zero."
          : "Whether it holds for other traffic is open: the comparison says why no difference has an interval."}`);
      byId("report-link").href = byId("report-frame").src = trial.report;
      byId("report-words").textContent = trial.table;
      byId("report").hidden = false;
      byId("report").scrollIntoView();
    } catch (error) {
      if (error.name === "AbortError") this.say("Stopped.");
      else this.say(error.message, true);
    } finally {
      clearInterval(clock);
      this.trying = null;
      byId("try").textContent = "Try";
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
    const sum = (counts) => counts.reduce((a, b) => a + b, 0);
    const numRequests = (side) => sum(since(side, "first_token"));
    const isEnough = Math.min(numRequests("live"), numRequests("shadow")) >= ENOUGH;
    /** @type {[string, number][]} */
    const shares = [["p50", 0.5], ["p99", 0.99]];
    const rows = [["first token", "first_token"], ["gap", "gap"], ["whole request", "whole"]].flatMap(([label, name]) =>
      shares.map(([percent, share]) => {
        const values = ["live", "shadow"].map((side) => bucketPercentile(shadow.bounds, since(side, name), share));
        return element("tr", {}, element("th", { scope: "row" }, `${label} ${percent}`),
          ...["live", "shadow"].map((side, i) => element("td", {}, values[i] === null ? "–" : `≤ ${duration(1e3 * values[i])}`,
            element("small", {}, `of ${count(sum(since(side, name)))}`))),
          element("td", {}, isEnough ? verdict(...values) : "–"));
      }));
    rows.push(element("tr", {}, element("th", { scope: "row" }, "running, waiting"),
      element("td", {}, `${count(this.story.gauges.num_running)}, ${count(this.story.gauges.num_waiting)}`),
      element("td", {}, `${count(shadow.num_running)}, ${count(shadow.num_waiting)}`), element("td", {})));
    const few = isEnough ? "" : ` No verdict: it needs ${ENOUGH} requests of each, and there are ${count(numRequests("live"))} and ${count(numRequests("shadow"))}.`;
    const words = shadow.is_failed ? "Its policy has raised: it is off." : `${shadow.policy} follows the live ${about.policy} five seconds behind, in virtual time. Counted since this page was opened, in buckets; beside each stands the number of requests or gaps. Part of a difference is the simulation's error: “Try” shows how large it is.${few}`;
    byId("shadow").replaceChildren(
      element("div", { class: "scroll shadow" }, element("table", {},
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, ""), element("th", { scope: "col" }, "live"), element("th", { scope: "col" }, "shadow"), element("th", { scope: "col" }, "shadow is"))),
        element("tbody", {}, ...rows))),
      element("p", { class: shadow.is_failed ? "small bad" : "small" }, words + (shadow.num_resets ? ` It was too far behind ${count(shadow.num_resets)} times and began anew.` : "")));
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text; // a name, as of another policy
  }
}
