// The stretch of time that the picture shows: a number of seconds, or what fits the traffic.
// Knows lives of requests and times in milliseconds; knows nothing that is drawn.
// @ts-check

const NICE = [1e3, 2e3, 5e3, 10e3, 20e3, 30e3, 60e3]; // a moving picture is one of these wide
const LONGEST_MS = 60e3; // the last of them
const QUIET_MS = 1500; // without a request: the traffic before it is over, and the picture rests
const SHORTEST_MS = 10; // of a picture at rest
const LIVES = 12; // lives that a picture is wide, at most: with more, requests are too thin to see

// Where the last traffic began and ended, and how long its requests lived; null: there was none.
export function lastTraffic(lives, now) {
  const ends = [];
  let isRunning = false;
  for (const life of lives) {
    ends.push([life.end ?? now, life.spans[0].from]);
    isRunning ||= life.end === null;
  }
  if (!ends.length) return null;
  ends.sort((a, b) => b[0] - a[0]);
  const to = ends[0][0];
  let from = to;
  const lengths = [];
  for (const [end, begin] of ends) {
    if (end < from - QUIET_MS) break;
    from = Math.min(from, begin);
    lengths.push(end - begin);
  }
  lengths.sort((a, b) => a - b);
  return { from, to, isRunning, typical: lengths[Math.floor(0.9 * (lengths.length - 1))] };
}

// {to, window, isMoving} of the picture that fits this traffic. `now` is the time that is drawn.
export function fit(last, now) {
  if (!last) return { to: now, window: 10e3, isMoving: true };
  const most = Math.max(LIVES * last.typical, 1e3);
  if (last.isRunning || now - last.to < QUIET_MS) {
    const wanted = Math.min(now - last.from, most);
    return { to: now, window: NICE.find((ms) => ms >= wanted) ?? LONGEST_MS, isMoving: true };
  }
  const length = Math.max(Math.min(last.to - last.from, most, LONGEST_MS), SHORTEST_MS);
  return { to: last.to + 0.03 * length, window: 1.06 * length, isMoving: false };
}

// Times for numbers on the axis, at least `pixels` apart: back from the right edge while the
// picture moves, and on from the left edge when it rests.
export function ticks({ to, window, isMoving }, perMs, pixels = 76) {
  const least = pixels / perMs;
  const power = 10 ** Math.floor(Math.log10(least));
  const every = [1, 2, 5, 10].map((one) => one * power).find((ms) => ms >= least * 0.999) ?? 10 * power;
  const found = [];
  for (let i = 0; i * every <= window * 1.0001; i++)
    found.push(isMoving ? { time: to - i * every, label: i ? `−${inWords(i * every)}` : "now" }
      : { time: to - window + i * every, label: i ? inWords(i * every) : "" });
  return found;

  function inWords(ms) {
    const unit = window >= 1e3 ? 1e3 : 1;
    const digits = Math.max(0, Math.ceil(-Math.log10(every / unit) - 1e-9));
    return `${(ms / unit).toFixed(digits)} ${unit === 1 ? "ms" : "s"}`;
  }
}
