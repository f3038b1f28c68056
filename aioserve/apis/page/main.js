// The page: listens to the stream, and gives every part its turn to draw.
// Knows the parts; what each shows is theirs.
// @ts-check

import { Chat } from "./chat.js";
import { Now } from "./now.js";
import { events, onKeyWanted, setKey } from "./server.js";
import { Story } from "./story.js";
import { Traffic } from "./traffic.js";
import { WhatIf } from "./what_if.js";
import { Why } from "./why.js";
import { byId } from "./words.js";

const WORDS_MS = 250; // how often what is read, not watched, changes
const AGAIN_MS = 1500; // until a lost stream is asked for again
const REFUSED_MS = 10000; // and one that was refused: no engine can be watched there, as on Ray
const HIDDEN_MS = 10000; // a tab that is hidden for so long stops listening
const MAX_HELD = 3000; // frames that wait for "Resume", three minutes; after more it begins anew

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const story = new Story();
const choose = (life) => { story.chosen = life; why.choose(life); };
const now = new Now(story, choose);
const why = new Why(story, choose);
const chat = new Chat(story);
const whatIf = new WhatIf(story);
new Traffic(story);
/** @type {{ onSnapshot?(): void, onFrame?(frame: object): void, words?(): void }[]} */
const parts = [now, why, chat, whatIf];

// The stream.

let listening = null; // what ends it
/** @type {(value?: any) => void} */
let keyGiven = () => {}; // resolves the promise that waits for a key

function say(words, isLost = false) {
  const node = byId("connection");
  if (node.textContent !== words) node.textContent = words;
  node.classList.toggle("lost", isLost);
}

// While the picture is held, nothing on the page moves: what comes waits.
const held = [];
now.onResume = () => {
  const isLost = held.length >= MAX_HELD;
  for (const [frame, at] of isLost ? [] : held) take(frame, at);
  held.length = 0;
  if (isLost) listening?.abort();
};

function take(frame, at) {
  story.take(frame, at);
  if (frame.kind === "snapshot") {
    byId("model").textContent = story.about.model;
    byId("simulated").hidden = !story.about.is_simulated;
    for (const part of parts) part.onSnapshot?.();
  }
  for (const part of parts) part.onFrame?.(frame);
}

async function listen() {
  while (!document.hidden || listening === null) {
    listening = new AbortController();
    try {
      for await (const frame of events("watch/steps", { signal: listening.signal })) {
        if (frame.error) throw new Error(frame.error.message);
        if (frame.kind === "snapshot") say("live");
        if (!now.isHeld) take(frame);
        else if (held.length < MAX_HELD) held.push([frame, performance.now()]);
      }
      say("the stream has ended; asking again", true);
    } catch (error) {
      if (document.hidden && listening.signal.aborted) break;
      if (!listening.signal.aborted) say(error.message, true);
      if (error.status === 401 || error.status === 403) await new Promise((done) => { keyGiven = done; });
      else if (error.status < 500) await pause(REFUSED_MS);
    }
    await pause(AGAIN_MS);
  }
}

let isListening = false;
async function keepListening() {
  if (isListening) return;
  isListening = true;
  try {
    await listen();
  } finally {
    isListening = false;
  }
  if (!document.hidden) keepListening();
  else say("asleep");
}

let sleeping = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(sleeping);
  if (document.hidden) sleeping = setTimeout(() => listening?.abort(), HIDDEN_MS);
  else keepListening();
});

// The key.

const dialog = byId("key-dialog");
let asked = null;
async function askForKey(words) {
  asked ??= new Promise((resolve) => {
    byId("key-words").textContent = `${words ? `${words}. ` : ""}It stays in this tab, until that is closed.`;
    byId("key-input").value = "";
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      asked = null;
      resolve(dialog.returnValue === "ok" ? byId("key-input").value.trim() : null);
    }, { once: true });
  });
  return asked;
}
onKeyWanted(askForKey);
byId("key-cancel").addEventListener("click", () => dialog.close(""));
byId("key").addEventListener("click", async () => {
  const key = await askForKey("");
  if (key !== null) {
    setKey(key);
    listening?.abort();
    keyGiven();
  }
});

// Drawing: the lanes with every frame of the screen, words now and then.

const calm = matchMedia("(prefers-reduced-motion: reduce)");
let lastWords = -Infinity;
function draw(time) {
  const isTime = time - lastWords >= WORDS_MS;
  if (isTime || !calm.matches) now.draw();
  if (isTime) {
    lastWords = time;
    if (story.about) {
      const policy = story.about.policy;
      if (byId("policy").textContent !== policy) byId("policy").textContent = policy;
      for (const part of parts) part.words?.();
    }
  }
  page.numDraws++;
  requestAnimationFrame(draw);
}

// For tests, and for the browser's console.
const page = { story, now, chat, numDraws: 0, get numHeld() { return held.length; }, listenAgain: () => listening?.abort() };
Object.assign(window, { aioserve: page });
requestAnimationFrame(draw);
keepListening();
