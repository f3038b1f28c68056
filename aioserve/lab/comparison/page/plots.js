// Line plots, step bars and interval marks as inline SVG, with values under the pointer.
// Knows numbers and axes; knows nothing about serving.

const SVG = "http://www.w3.org/2000/svg";
const FRAME = { width: 370, height: 240, left: 60, right: 14, top: 12, bottom: 40 };
const WIDE = { ...FRAME, width: 560, height: 250 };

function element(name, attributes = {}, ...children) {
  const isSvg = ["svg", "g", "path", "line", "rect", "text", "circle"].includes(name);
  const node = isSvg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// An element that page.html has.
const part = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

const color = (i) => `var(--c${i % 9})`;

function seconds(value) {
  if (value >= 99.5) return `${value.toFixed(0)} s`;
  if (value >= 0.9995) return `${+value.toPrecision(3)} s`;
  if (value >= 9.995e-4) return `${+(value * 1e3).toPrecision(3)} ms`;
  return value === 0 ? "0" : `${+(value * 1e6).toPrecision(3)} µs`;
}
function count(value) {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)} M`;
  if (value >= 1e4) return `${+(value / 1e3).toPrecision(3)} k`;
  return `${+value.toPrecision(4)}`;
}
const percent = (value) => `${+(100 * value).toFixed(1)}%`;

// Round numbers that cover low to high.
function linearTicks(low, high, wanted = 5) {
  if (!(high > low)) high = low + 1;
  const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw) ?? 10 * power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) ticks.push(i * step);
  return ticks;
}
function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const digit of Math.log10(high / low) > 2.5 ? [1] : Math.log10(high / low) > 1.3 ? [1, 3] : [1, 2, 5]) {
      const tick = digit * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  return ticks;
}

// A scale is a function and its inverse.
const LINEAR = [(v) => v, (v) => v];
const LOG = [Math.log10, (v) => 10 ** v];
// Shares: the last tenth is stretched, so that p99 and p99.9 can be seen.
const NINES = [
  (p) => (p <= 0.9 ? p / 1.5 : 0.6 + 0.2 * Math.min(-1 - Math.log10(Math.max(1 - p, 1e-9)), 2)),
  (v) => (v <= 0.6 ? v * 1.5 : 1 - 10 ** (-1 - (v - 0.6) / 0.2)),
];
const NINES_TICKS = [0, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999].map((p) => [p, percent(p)]);

// Differences: linear to 1%, then as far from 1% to 10% as from 10% to 100%.
const SIGNED = [
  (v) => Math.sign(v) * Math.log10(1 + Math.abs(v) / 0.01),
  (v) => Math.sign(v) * 0.01 * (10 ** Math.abs(v) - 1),
];
const SIGNED_TICKS = [-10, -1, -0.1, 0, 0.1, 1, 10];

function scale(low, high, from, to, [f, inverse] = LINEAR) {
  const span = f(high) - f(low) || 1;
  const at = (value) => from + ((f(value) - f(low)) / span) * (to - from);
  at.invert = (place) => inverse(f(low) + ((place - from) / (to - from)) * span);
  return at;
}

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const v of list) if (v !== null) { if (v < low) low = v; if (v > high) high = v; }
  return low <= high ? [low, high] : [0, 1];
}

function frame(options, x, y, box = FRAME) {
  const { width, height, left, right, top, bottom } = box;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const [value, text] of options.yTicks) {
    svg.append(element("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(element("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, text));
  }
  for (const [value, text] of options.xTicks) {
    svg.append(element("line", { class: "axis", x1: x(value), x2: x(value), y1: height - bottom, y2: height - bottom + 4 }));
    svg.append(element("text", { x: x(value), y: height - bottom + 17, "text-anchor": "middle" }, text));
  }
  svg.append(element("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, options.xLabel));
  if (options.yLabel) {
    const middle = (top + height - bottom) / 2;
    svg.append(element("text", { transform: `translate(11 ${middle}) rotate(-90)`, "text-anchor": "middle" }, options.yLabel));
  }
  return svg;
}

// series: [{name, color, x, y}]. With isShare, y is a share and the pointer reads all series at one
// y; else at one x. With low and high, a point has a whisker from one to the other.
/**
 * @param {{title: string, series: any[], xLabel: string, yLabel: string, xFormat: (v: number) => string,
 *   yFormat: (v: number) => string, xLog?: boolean, yMax?: number, xNames?: string[], isShare?: boolean,
 *   dots?: boolean}} options
 */
function linePlot({ title, series, xLabel, yLabel, xFormat, yFormat, xLog = false, yMax, xNames, isShare = false, dots = false }) {
  const { width, height, left, right, top, bottom } = FRAME;
  let [xLow, xHigh] = extent(series.map((s) => s.x));
  if (xLog) { xLow = Math.max(xLow, 1e-5); xHigh = Math.max(xHigh, xLow * 1.5); }
  const yHigh = yMax ?? (extent(series.flatMap((s) => [s.y, s.high ?? []]))[1] * 1.06 || 1);
  const x = scale(xLow, xHigh, left, width - right, xLog ? LOG : LINEAR);
  const y = scale(0, isShare ? 0.999 : yHigh, height - bottom, top, isShare ? NINES : LINEAR);
  const ticks = xNames ? xNames.map((name, i) => [i, name])
    : (xLog ? logTicks(xLow, xHigh) : linearTicks(xLow, xHigh)).map((v) => [v, xFormat(v)]);
  const svg = frame({ xLabel, yLabel, xTicks: ticks, yTicks: isShare ? NINES_TICKS : linearTicks(0, yHigh, 4).map((v) => [v, yFormat(v)]) }, x, y);
  for (const s of series) {
    let path = "";
    s.x.forEach((v, i) => {
      if (s.y[i] !== null) path += `${path ? "L" : "M"}${x(Math.max(v, xLow)).toFixed(1)} ${y(s.y[i]).toFixed(1)}`;
    });
    svg.append(element("path", { class: "curve", d: path, style: `stroke:${s.color}` }));
    (s.high ?? []).forEach((high, i) => high !== null && svg.append(element("line", {
      x1: x(s.x[i]), x2: x(s.x[i]), y1: y(Math.max(s.low[i], 0)), y2: y(high), style: `stroke:${s.color};stroke-width:5;opacity:.35`,
    })));
    if (dots) s.x.forEach((v, i) => s.y[i] !== null && svg.append(element("circle", { cx: x(v), cy: y(s.y[i]), r: 3, style: `fill:${s.color}` })));
  }
  const cross = element("line", { class: "cross", visibility: "hidden" });
  svg.append(cross);
  const nearest = (list, value) => {
    let best = 0;
    list.forEach((v, i) => { if (Math.abs(v - value) < Math.abs(list[best] - value)) best = i; });
    return best;
  };
  hover(svg, (px, py) => {
    const atX = !isShare;
    if (atX) place(cross, px, px, top, height - bottom);
    else place(cross, left, width - right, py, py);
    const value = atX ? x.invert(px) : Math.min(Math.max(y.invert(py), 0), 1);
    const head = atX ? (xNames ? xNames[nearest(series[0].x, value)] : xFormat(value)) : `${percent(value)} of all within`;
    const lines = series.filter((s) => s.x.length).map((s) => {
      const i = nearest(atX ? s.x : s.y, value);
      return [s.color, s.name, atX ? (s.y[i] === null ? "-" : yFormat(s.y[i])) : xFormat(s.x[i])];
    });
    return [head, lines];
  }, cross);
  return panel(title, svg);
}

// Each step a bar: as wide and as high as it took long, coloured by its share of prompt tokens.
function stepPlot({ title, steps, yHigh, begin, xSpan }) {
  const { width, height, left, right, top, bottom } = WIDE;
  const x = scale(begin, begin + xSpan, left, width - right), y = scale(0, yHigh, height - bottom, top);
  const svg = frame({
    xLabel: "seconds since the start", yLabel: "duration of a step",
    xTicks: linearTicks(begin, begin + xSpan).map((v) => [v, `${+v.toPrecision(6)}`]),
    yTicks: linearTicks(0, yHigh, 4).map((v) => [v, seconds(v)]),
  }, x, y, WIDE);
  steps.start.forEach((start, i) => {
    const share = steps.prefill_tokens[i] / (steps.prefill_tokens[i] + steps.decodes[i]);
    const end = Math.min(start + steps.seconds[i], begin + xSpan);
    svg.append(element("rect", {
      x: x(start), y: y(steps.seconds[i]), width: Math.max(x(end) - x(start) - 0.4, 0.6),
      height: y(0) - y(steps.seconds[i]),
      style: `fill:color-mix(in oklab, var(--prefill) ${Math.round(100 * share)}%, var(--decode))`,
    }));
  });
  hover(svg, (px) => {
    const time = x.invert(px);
    let i = steps.start.findLastIndex((start) => start <= time);
    if (i < 0) i = 0;
    return [`step of ${seconds(steps.seconds[i])} at ${steps.start[i].toFixed(3)} s`, [
      ["var(--prefill)", "prompt tokens", steps.prefill_tokens[i]],
      ["var(--decode)", "decodes", steps.decodes[i]],
    ]];
  }, null, WIDE);
  return panel(title, svg);
}

// Differences and their intervals as shares of the first value, all rows on one axis.
const FOREST = { width: 220, height: 18, margin: 8 };

function forestScale(cells) {
  const shares = cells.flatMap(({ difference: d, base }) => [d.value, d.low ?? 0, d.high ?? 0].map((v) => Math.abs(v / base)));
  const limit = Math.min(Math.max(...shares, 0.1), 10);
  const x = scale(-limit, limit, FOREST.margin, FOREST.width - FOREST.margin, SIGNED);
  return { limit, x, ticks: SIGNED_TICKS.filter((v) => Math.abs(v) <= limit) };
}
function forestAxis({ x, ticks }) {
  const svg = element("svg", { viewBox: `0 0 ${FOREST.width} 14` });
  for (const tick of ticks)
    svg.append(element("text", { x: x(tick), y: 11, "text-anchor": "middle" }, tick > 0 ? `+${percent(tick)}` : percent(tick).replace("-", "−")));
  return svg;
}
function forest({ difference: { value, low, high }, base, verdict }, { limit, x, ticks }) {
  const { width, height } = FOREST, middle = height / 2;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}` });
  for (const tick of ticks)
    svg.append(element("line", { class: "axis", x1: x(tick), x2: x(tick), y1: 0, y2: height, style: tick ? "opacity:.5" : "" }));
  const tone = verdict === "better" ? "var(--good)" : verdict === "worse" ? "var(--bad)" : "var(--faint)";
  const at = (v) => x(Math.min(Math.max(v / base, -limit), limit));
  if (low !== null) svg.append(element("line", { x1: at(low), x2: at(high), y1: middle, y2: middle, style: `stroke:${tone};stroke-width:2` }));
  if (Math.abs(value / base) <= limit) svg.append(element("circle", { cx: at(value), cy: middle, r: 3.4, style: `fill:${tone}` }));
  else svg.append(element("path", { // off the scale
    d: value > 0 ? `M${width - 8} 4L${width} 9L${width - 8} 14Z` : "M8 4L0 9L8 14Z", style: `fill:${tone}`,
  }));
  return svg;
}

function place(line, x1, x2, y1, y2) {
  for (const [key, value] of Object.entries({ x1, x2, y1, y2, visibility: "visible" })) line.setAttribute(key, value);
}

function hover(svg, describe, cross, frameBox = FRAME) {
  const tip = part("tip");
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), zoom = frameBox.width / box.width;
    const px = (event.clientX - box.left) * zoom, py = (event.clientY - box.top) * zoom;
    const { width, height, left, right, top, bottom } = frameBox;
    if (px < left || px > width - right || py < top || py > height - bottom) return leave();
    const [head, lines] = describe(px, py);
    tip.replaceChildren(element("b", {}, head));
    for (const [tone, name, value] of lines)
      tip.append(element("div", {}, element("i", { style: `background:${tone}` }), `${name}: ${value}`));
    tip.hidden = false;
    const isRight = event.clientX > window.innerWidth - 260;
    tip.style.left = `${event.clientX + (isRight ? -tip.offsetWidth - 14 : 14)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
  });
  const leave = () => { tip.hidden = true; if (cross) cross.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointerleave", leave);
}

function panel(title, ...content) {
  return element("section", { class: "panel" }, element("h3", {}, title), ...content);
}
