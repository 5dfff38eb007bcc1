// The behaviour of the page's buttons and fields.

import { getJson } from "./api.js";
import { $, make, setText } from "./dom.js";
import { House } from "./house.js";
import { Messages, isSend } from "./messages.js";
import { Settings } from "./settings.js";
import { Store } from "./store.js";
import { Talk } from "./talk.js";

const NARROW = matchMedia("(max-width: 899px)");
const AGAIN = 2000; // milliseconds before a server that did not answer is asked again

const store = new Store(localStorage);
const talk = new Talk(store, changed);
const messages = new Messages($("messages"), $("scroll"), { retry, edit });
const house = new House($("house"), store, ({ model }) => model && setText($("model"), model));
const settings = new Settings(store, meet);
let frame = 0;
let meeting = false; // whether the server is being asked for its model
let again = 0; // the timer for asking again

function changed(what, message, pace) {
  setText($("send"), talk.live ? "Stop" : "Send");
  if (what === "begun") say("The model is answering.");
  if (what === "ended") say(`The answer has ended. ${message.content.slice(0, 300)}`);
  if (pace) setText($("speed"), pace.text);
  if (what === "begun") showChat();
  else if (what === "ended") draw(message);
  else frame ||= requestAnimationFrame(() => draw(message));
}

function draw(message) {
  cancelAnimationFrame(frame);
  frame = 0;
  const shown = store.chat.messages.at(-1) === message;
  if (shown) messages.update(message, talk.live);
  if (talk.live) return;
  if (shown) showList();
  else showChat();
}

async function answerNow() {
  store.save();
  notice("");
  try {
    await talk.run(store.chat);
  } catch (error) {
    if (error.status === 401) lock();
    else notice(error.message);
  }
}

function ask(text) {
  store.chat.messages.push({ role: "user", content: text });
  answerNow();
}

async function retry(index) {
  await halt();
  store.chat.messages.length = index;
  answerNow();
  $("prompt").focus();
}

async function edit(index, text) {
  await halt();
  store.chat.messages.length = index;
  ask(text);
  $("prompt").focus();
}

// Stops the answer in progress, if there is one, and waits for its end.
async function halt() {
  talk.stop();
  while (talk.live) await new Promise((resolve) => setTimeout(resolve));
}

function showChat() {
  messages.show(store.chat.messages);
  $("empty").hidden = store.chat.messages.length > 0;
  showList();
}

function showList() {
  $("conversations").replaceChildren(...store.chats.map((chat) => entry(chat)));
}

function entry(chat) {
  const current = chat === store.chat;
  const open = { type: "button", class: "open", "aria-current": current && "true", onclick: () => show(chat) };
  const remove = { type: "button", class: "remove", "aria-label": `Delete ${chat.title}`, onclick: () => drop(chat) };
  return make("li", {}, make("button", open, chat.title), make("button", remove, "\u00d7"));
}

function show(chat) {
  store.show(chat.id);
  showChat();
  closeDrawers();
  $("prompt").focus();
}

async function drop(chat) {
  if (!confirm(`Delete "${chat.title}"?`)) return;
  if (chat === talk.chat) await halt();
  store.remove(chat.id);
  showChat();
  $("new").focus();
}

function notice(text) {
  setText($("notice"), text);
  $("notice").hidden = !text;
}

const say = (text) => setText($("status"), text);

// Shows why the server refuses requests, and the field for the key in place of that for a message.
function lock() {
  const { key } = store.settings;
  notice(key ? "The server refuses this API key. Check it and try again." : "This server needs its API key.");
  openKey();
}

function openKey() {
  closeDrawers();
  $("unlock").hidden = false;
  $("ask").hidden = true;
  $("key").select();
  $("key").focus();
}

function closeKey() {
  if ($("unlock").hidden) return;
  $("unlock").hidden = true;
  $("ask").hidden = false;
  $("prompt").focus();
}

function drawer(id, open) {
  document.body.classList.toggle(`with-${id}`, open);
  $(`show-${id}`).setAttribute("aria-expanded", String(open));
  house.wake();
}

function closeDrawers() {
  if (NARROW.matches) for (const id of ["list", "house"]) drawer(id, false);
}

function toggle(id) {
  const open = !document.body.classList.contains(`with-${id}`);
  closeDrawers();
  drawer(id, open);
}

function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight * 0.4)}px`;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (talk.live) talk.stop();
  else if (text) {
    $("prompt").value = "";
    grow();
    ask(text);
  }
});
$("prompt").addEventListener("keydown", (event) => {
  if (isSend(event) && !talk.live) $("ask").requestSubmit();
});
$("prompt").addEventListener("input", grow);
$("unlock").addEventListener("submit", (event) => {
  event.preventDefault(); // the change event has stored the key
  meet();
});
$("rekey").addEventListener("click", openKey);
$("new").addEventListener("click", () => show(store.begin()));
for (const id of ["list", "house"]) $(`show-${id}`).addEventListener("click", () => toggle(id));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (house.ready) closeKey();
  const open = NARROW.matches && ["list", "house"].find((id) => document.body.classList.contains(`with-${id}`));
  if (!open) return;
  closeDrawers();
  $(`show-${open}`).focus();
});
addEventListener("pagehide", () => talk.live && store.save(talk.chat));
addEventListener("storage", takeIn);

// Shows the changes that another tab has made. A conversation being answered or edited here stays, unless it was deleted.
async function takeIn() {
  const shown = store.chat;
  store.reload([talk.chat, document.querySelector("form.edit") && shown]);
  settings.show();
  if (talk.live && !store.chats.includes(talk.chat)) await halt();
  if (store.chat === shown) showList();
  else showChat();
}

// Asks the server for the model's name, and again if the key has changed meanwhile.
async function meet() {
  if (meeting) return;
  meeting = true;
  clearTimeout(again);
  let key;
  do {
    ({ key } = store.settings);
    await look(key);
  } while (key !== store.settings.key);
  meeting = false;
  house.wake();
}

async function look(key) {
  try {
    setText($("model"), (await getJson("/v1/models", key)).data[0].id);
    notice("");
    house.ready = true;
    closeKey();
  } catch (error) {
    if (error.status === 401) lock();
    else {
      notice("The server does not answer. Trying again.");
      again = setTimeout(meet, AGAIN);
    }
  }
}

drawer("list", !NARROW.matches);
drawer("house", !NARROW.matches);
showChat();
if (!NARROW.matches) $("prompt").focus();
meet();
