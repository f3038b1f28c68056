// What is asked of the server: JSON, and streams of events; with a key where it wants one.
// The key stays in this tab's session. Knows nothing about what is asked.
// @ts-check

const KEY = "aioserve-key";
const WANTS_KEY = ["invalid_api_key", "not_allowed"];

export class Refusal extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** @type {(words: string) => Promise<string | null>} */
let askForKey = async () => null;
export function onKeyWanted(ask) { askForKey = ask; }
export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

async function send(path, options, mayAsk = true) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const { message, code } = await refusal(response);
  if (WANTS_KEY.includes(code) && mayAsk) {
    const given = await askForKey(message);
    if (given) {
      setKey(given);
      return send(path, options, false);
    }
  }
  throw new Refusal(response.status, message, code);
}

async function refusal(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error;
  } catch {
    return { message: text || `the server answered ${response.status}`, code: null };
  }
}

const body = (value) => ({
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(value),
});

export async function get(path, signal) { return (await send(path, { signal })).json(); }
export async function post(path, value, signal) {
  return (await send(path, { ...body(value), signal })).json();
}

/**
 * The data of each event, parsed; what is no JSON ends it.
 * @param {string} path
 * @param {{ value?: object, signal?: AbortSignal }} options
 * @returns {AsyncGenerator<any, void, void>}
 */
export async function* events(path, { value, signal } = {}) {
  const options = value === undefined ? {} : body(value);
  const response = await send(path, { ...options, signal, cache: "no-store" });
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value: text, done } = await reader.read();
    if (done) return;
    const whole = (rest + text).split("\n\n");
    rest = whole.pop() ?? "";
    for (const event of whole) {
      const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data === undefined) continue;
      if (!data.startsWith("{")) return;
      yield JSON.parse(data);
    }
  }
}
