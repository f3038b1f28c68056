// The report, from top to bottom.

const data = JSON.parse(part("data").textContent ?? "");
const page = part("page");
const results = data.results;

function section(title, text, ...content) {
  page.append(element("h2", {}, title));
  if (text) page.append(element("p", { class: "faint" }, text));
  page.append(...content);
}
function legend(entries, isBox = false) {
  return element("div", { class: "legend" }, ...entries.map(([name, tone]) =>
    element("span", {}, element("i", { class: isBox ? "box" : "", style: `background:${tone}` }), name)));
}
const grid = (kind, plots) => element("div", { class: `grid ${kind}` }, ...plots);
const configs = () => legend(results.map((r, i) => [r.name, color(i)]));
const tone = (verdict) => (verdict === "better" ? "good" : verdict === "worse" ? "bad" : "faint");

function header() {
  const names = data.sweep ? `${data.sweep.setting} from ${data.sweep.values[0]} to ${data.sweep.values.at(-1)}`
    : results.length > 1 ? `${results.slice(1).map((r) => r.name).join(" and ")} against ${results[0].name}` : results[0].name;
  page.append(element("h1", {}, names), element("p", { class: "faint" }, data.headline));
  if (data.slo) page.append(element("p", { class: "faint" }, data.slo));
  page.append(...data.these.map((line) => element("p", { class: "these" }, line)));
  if (data.remarks.length)
    page.append(element("ul", { class: "remarks" }, ...data.remarks.map((r) => element("li", {}, r))));
}

function words() {
  if (!data.pairs.length || data.sweep) return;
  const cards = data.pairs.map((pair) => {
    const list = element("dl");
    for (const line of pair.summary) {
      const [head, ...rest] = line.split(": ");
      if (!rest.length) list.append(element("dt", { class: "faint" }, "pairs"), element("dd", {}, line));
      else {
        const short = head.startsWith("not disting") ? "noise" : head.startsWith("no interval") ? "unknown" : head.startsWith("less") ? "within 1%" : head;
        list.append(element("dt", { class: tone(head) }, short), element("dd", {}, rest.join(": ")));
      }
    }
    return panel(`${pair.other} against ${pair.first}`, list);
  });
  section("In words", "Better and worse are said of differences whose 95% interval leaves out zero; noise of all others.",
    element("div", { class: "words" }, ...cards));
}

// Intervals of differences, drawn where the first value would be with them.
function whiskers(cells, factor) {
  const end = (name) => cells.map((cell) => {
    const d = cell.difference;
    return d && d[name] !== null && cells[0].value !== null ? (cells[0].value + d[name]) * factor : null;
  });
  return { low: end("low"), high: end("high") };
}

function sweep() {
  if (!data.sweep) return;
  const find = (label) => data.table.find((row) => row.label.startsWith(label));
  const plot = (title, labels, yLabel, format, factor = 1) => {
    const series = labels.filter(find).map((label, i) => ({
      name: label, color: color(i), x: results.map((_, k) => k),
      y: find(label).cells.map((cell) => (cell.value === null ? null : cell.value * factor)),
      ...whiskers(find(label).cells, factor),
    }));
    if (!series.length) return [];
    const made = linePlot({ title, series, yLabel, yFormat: format, xFormat: String, xLabel: data.sweep.setting, xNames: data.sweep.values, dots: true });
    made.querySelector("h3").after(legend(series.map((s) => [s.name.split(",")[0], s.color])));
    return [made];
  };
  section("The sweep", `One setting, everything else equal. A bar is the 95% interval of the difference from ${data.sweep.values[0]}.`, grid("", [
    ...plot("Time to first token", ["TTFT p50", "TTFT p99"], "", seconds, 1e-3),
    ...plot("Gaps between tokens", ["gap p50", "gap p99", "gap max"], "", seconds, 1e-3),
    ...plot("End to end", ["end to end p50", "end to end p99"], "", seconds, 1e-3),
    ...plot("Throughput", ["output tokens/s"], "tokens per second", count),
    ...plot("Within the SLO", ["within the SLO"], "", (v) => `${+v.toPrecision(3)}%`),
    ...plot("Energy", ["J per output token"], "joules per output token", (v) => `${+v.toPrecision(3)}`),
    ...plot("Energy of a request", ["J per request"], "joules per request", (v) => `${+v.toPrecision(3)}`),
    ...plot("Price", ["price, 1M output"], "per million output tokens", (v) => `${+v.toPrecision(3)}`),
  ]));
}

const number = (v, row) => (v === null ? "–" : v.toFixed(row.digits));
function signed(v, row) {
  const text = Math.abs(v).toFixed(row.digits);
  return (+text === 0 ? "" : v > 0 ? "+" : "−") + text;
}
const interval = (d, row) => (d && d.low !== null ? `${signed(d.low, row)} … ${signed(d.high, row)}` : "");

function makeTable(heads, rows) {
  return element("div", { class: "scroll panel" }, element("table", {},
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)));
}

function pairTable(k) {
  const drawn = data.table.map((row) => ({ ...row.cells[k], base: row.cells[0].value }));
  const axis = forestScale(drawn.filter((cell) => cell.difference && cell.base > 0));
  const beside = data.has_recorded ? ["recorded"] : []; // what the server measured
  const heads = ["", ...beside, results[0].name, results[k].name, "difference", "95% interval"].map((h) => element("th", {}, h));
  heads.push(element("th", { class: "forest" }, forestAxis(axis)), element("th", { class: "left" }, ""));
  return makeTable(heads, data.table.map((row, i) => {
    const first = row.cells[0].value, cell = row.cells[k], d = cell.difference;
    const mark = element("td", { class: "forest" });
    if (d && first > 0) mark.append(forest(drawn[i], axis));
    return element("tr", {}, element("td", {}, row.label),
      ...beside.map(() => element("td", { class: "faint" }, number(row.recorded, row))),
      element("td", {}, number(first, row)), element("td", {}, number(cell.value, row)),
      element("td", {}, d ? signed(d.value, row) : ""),
      element("td", { class: "faint" }, interval(d, row)),
      mark, element("td", { class: `left ${tone(cell.verdict)}` }, cell.verdict));
  }));
}

function table() {
  const text = results.length > 1 && !data.sweep
    ? `Differences are against ${results[0].name}; the marks show them, and their interval, as a share of its value, on a logarithmic scale beyond 1%.`
    : data.sweep ? `Below a value: the 95% interval of its difference from that of ${results[0].name}.` : "";
  if (data.sweep || results.length === 1)
    section("In numbers", text, makeTable(["", ...results.map((r) => r.name)].map((h) => element("th", {}, h)),
      data.table.map((row) => element("tr", {}, element("td", {}, row.label), ...row.cells.map((c) => element("td", {},
        number(c.value, row), element("div", { class: "small faint" }, interval(c.difference, row))))))));
  else section("In numbers", text, ...results.slice(1).map((_, k) => pairTable(k + 1)));
}

function meanings() {
  const list = element("dl", { class: "meanings" });
  for (const [word, meaning] of Object.entries(data.meanings)) list.append(element("dt", {}, word), element("dd", {}, meaning));
  section("What the words mean", "", element("div", { class: "panel" }, list));
}

function groups() {
  const share = (v) => (v === null ? "–" : `${(100 * v).toFixed(1)}%`);
  for (const { kind, columns, rows, more, note } of data.groups) {
    const hasShares = rows.some((row) => row.share !== null), hasUnfinished = rows.some((row) => row.unfinished);
    const heads = [kind, "under", "requests", ...(hasUnfinished ? ["unfinished"] : []), ...columns,
      ...(hasShares ? ["competing", "share", "due", "behind"] : [])];
    const ms = { digits: 1 };
    const lines = rows.map((row, i) => element("tr", { class: i && rows[i - 1].name === row.name ? "" : "first" },
      element("td", {}, i && rows[i - 1].name === row.name ? "" : row.name), element("td", { class: "left" }, row.config),
      element("td", {}, row.requests), ...(hasUnfinished ? [element("td", {}, row.unfinished)] : []),
      ...row.cells.map((cell) => element("td", {
        class: ["better", "worse"].includes(cell.verdict) ? tone(cell.verdict) : "",
        title: cell.difference ? `${signed(cell.difference.value, ms)} (${interval(cell.difference, ms)}): ${cell.verdict}` : "",
      }, number(cell.value, ms))),
      ...(hasShares ? [row.competing, row.share, row.due_share].map((v) => element("td", {}, share(v))) : []),
      ...(hasShares ? [element("td", {}, row.behind === null ? "–" : row.behind.toFixed(0))] : [])));
    const text = `Latencies in milliseconds.${results.length > 1 ? ` Green and red differ from ${results[0].name} for sure, by more than 1%.` : ""}`;
    const after = [hasShares ? `${note[0].toUpperCase()}${note.slice(1)}.` : "",
      more ? `${more} more waited less for their first tokens; they are in the JSON.` : ""].filter(Boolean).join(" ");
    section(`By ${kind}`, text, makeTable(heads.map((h, i) => element("th", { class: i < 2 ? "left" : "" }, h)), lines),
      ...(after ? [element("p", { class: "faint" }, after)] : []));
  }
}

function curves() {
  const plot = (title, key, xLabel) => linePlot({
    title, xLabel, yLabel: "share of all", xLog: true, isShare: true, xFormat: seconds, yFormat: percent,
    series: results.map((r, i) => ({
      name: r.name, color: color(i), x: r.distributions[key], y: r.distributions[key].map((_, k) => r.distributions.shares[k]),
    })),
  });
  section("How long requests wait", "Share of requests, or of gaps, that took at most this time: further left is faster. Time is logarithmic, and the last tenth of the requests is stretched.",
    configs(), grid("", [
      plot("Time to first token", "ttft", "from arrival to the first token"),
      plot("Inter-token latency", "gaps", "from one token to the next"),
      plot("End to end", "e2e", "from arrival to the last token"),
    ]));
}

function overTime() {
  const plot = (title, key, yLabel, yFormat, yMax) => linePlot({
    title, xLabel: "seconds since the start", yLabel, xFormat: (v) => `${+v.toPrecision(4)}`, yFormat, yMax,
    series: results.map((r, i) => ({ name: r.name, color: color(i), x: r.timelines.time, y: r.timelines[key] })),
  });
  section("The engine over time", "Of the first seed.", configs(), grid("", [
    plot("Waiting", "waiting", "requests in the queue", count),
    plot("Running", "running", "requests in the batch", count),
    plot("KV cache in use", "kv_usage", "share of the blocks", percent),
  ]));
}

function service() {
  const users = [...new Set(results.flatMap((r) => Object.keys(r.timelines.service.users)))];
  const [, yMax] = extent(results.flatMap((r) => Object.values(r.timelines.service.users)));
  const plots = results.map((r) => linePlot({
    title: r.name, xLabel: "seconds since the start", yLabel: "tokens served", xFormat: (v) => `${+v.toPrecision(4)}`,
    yFormat: count, yMax: yMax * 1.05,
    series: users.filter((u) => r.timelines.service.users[u]).map((u) => ({
      name: u, color: color(users.indexOf(u)), x: r.timelines.service.time, y: r.timelines.service.users[u],
    })),
  }));
  section("Service to each client", "Tokens of prompts and replies, summed up, of the first seed.",
    legend(users.map((u, i) => [u, color(i)])), grid("", plots));
}

function steps() {
  const all = results.map((r) => r.timelines.steps);
  const yHigh = Math.max(...all.flatMap((s) => s.seconds), 1e-6) * 1.06;
  const [begin, end] = all[0].window;
  section("Steps, one by one", "Around the moment at which most requests waited, of the first seed. A bar is as wide and as high as its step took long: a request that is decoding gets no token faster than that.",
    legend([["decodes", "var(--decode)"], ["prompt tokens", "var(--prefill)"]], true),
    grid("wide", results.map((r) => stepPlot({ title: r.name, steps: r.timelines.steps, yHigh, begin, xSpan: end - begin }))));
}

function victims() {
  const rows = data.pairs.flatMap((pair) => pair.victims.map((v) => element("tr", {},
    element("td", {}, pair.other), element("td", { class: "left" }, `seed ${v.seed}, request ${v.request}${v.user ? `, ${v.user}` : ""}`),
    ...[v.prompt_tokens, v.output_tokens, seconds(v.e2e_first), seconds(v.e2e), `${v.slowdown.toFixed(2)} times`].map((t) => element("td", {}, t)))));
  if (!rows.length || data.sweep) return;
  const names = ["under", "request", "prompt tokens", "output tokens", `end to end, ${results[0].name}`, "end to end", "slower"];
  section("Worst victims", "The requests whose end-to-end time grew by the largest factor.", makeTable(
    names.map((n, i) => element("th", { class: i < 2 ? "left" : "" }, n)), rows));
}

function settings() {
  page.append(element("details", {}, element("summary", {}, "Settings of every configuration"),
    ...results.map((r) => element("pre", {}, `${r.name}\n${JSON.stringify(r.settings, null, 1)}`))));
}

header();
words();
sweep();
curves();
table();
meanings();
groups();
service();
overTime();
steps();
victims();
settings();
