// What stays in the browser: conversations, which of them is shown, settings.

const CHATS = "tpi.chats";
const SHOWN = "tpi.shown";
const SETTINGS = "tpi.settings";
const MOST = 100; // conversations that are kept

export class Store {
  constructor(storage) {
    this.storage = storage;
    this.chats = this.#chats();
    this.settings = { key: "", system: "", temperature: "", ...this.#read(SETTINGS, {}) };
    const shown = this.#read(SHOWN, "");
    this.chat = this.chats.find((chat) => chat.id === shown) ?? this.chats[0] ?? this.begin();
  }

  // What another tab has written; the conversation that is shown here stays the one that is shown.
  reload() {
    const chats = this.#chats();
    this.chat = chats.find((chat) => chat.id === this.chat.id) ?? this.chat;
    this.chats = chats.includes(this.chat) ? chats : [this.chat, ...chats];
  }

  begin() {
    const empty = this.chats.find((chat) => !chat.messages.length);
    this.chat = empty ?? { id: newId(), title: "New chat", messages: [] };
    if (!empty) this.chats.unshift(this.chat);
    this.chats.length = Math.min(this.chats.length, MOST);
    this.save();
    return this.chat;
  }

  show(id) {
    this.chat = this.chats.find((chat) => chat.id === id) ?? this.chat;
    this.save();
  }

  remove(id) {
    this.chats = this.chats.filter((chat) => chat.id !== id);
    if (this.chat.id === id) this.chat = this.chats[0] ?? this.begin();
    this.save();
  }

  save() {
    const first = this.chat.messages.find((message) => message.role === "user");
    if (first) this.chat.title = first.content.trim().split("\n")[0].slice(0, 60) || "New chat";
    this.#write(SHOWN, this.chat.id);
    this.#write(SETTINGS, this.settings);
    while (!this.#write(CHATS, this.chats) && this.#forgetOldest());
  }

  #chats() {
    return this.#read(CHATS, []).filter((chat) => chat && Array.isArray(chat.messages));
  }

  #forgetOldest() {
    const last = this.chats.findLastIndex((chat) => chat !== this.chat);
    if (last >= 0) this.chats.splice(last, 1);
    return last >= 0;
  }

  #read(name, otherwise) {
    try {
      return JSON.parse(this.storage.getItem(name)) ?? otherwise;
    } catch {
      return otherwise;
    }
  }

  #write(name, value) {
    try {
      this.storage.setItem(name, JSON.stringify(value));
      return true;
    } catch {
      return false; // it is full, or the browser keeps nothing
    }
  }
}

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
