// The data stored in the browser: conversations, which of them is shown, settings. Several tabs share it.
//
// Each conversation is an entry of its own, written by the tab that continues it. Other tabs' copies may be old.

const CHAT = "tpi.chat."; // and the conversation's id
const LIST = "tpi.chats"; // all conversations in one entry, as earlier versions wrote them
const SHOWN = "tpi.shown";
const SETTINGS = "tpi.settings";
const MOST = 100; // limit of stored conversations

export class Store {
  #known = new Map(); // by id: the text last read or written of each stored conversation

  constructor(storage) {
    this.storage = storage;
    this.chats = [];
    this.settings = { key: "", system: "", temperature: "" };
    this.#split();
    this.#take([]);
    const shown = this.#read(SHOWN, "");
    this.chat = this.chats.find((chat) => chat.id === shown) ?? (shown ? null : this.chats[0]) ?? this.begin();
  }

  // Reads what other tabs have written, except for the conversations `held`, which this tab is working on. If the shown
  // one was deleted, another is shown.
  reload(held = []) {
    this.#take(held);
    this.chat = this.chats.find((chat) => chat.id === this.chat.id) ?? this.chats[0] ?? this.begin();
  }

  // Begins a new conversation. It is stored once it has a message.
  begin() {
    if (!this.chat || this.chat.messages.length) {
      this.chat = { id: newId(), title: "New chat", begun: Date.now(), messages: [] };
      this.chats.unshift(this.chat);
    }
    this.#write(SHOWN, this.chat.id);
    return this.chat;
  }

  show(id) {
    this.chat = this.chats.find((chat) => chat.id === id) ?? this.chat;
    this.chats = this.chats.filter((chat) => chat.messages.length || chat === this.chat);
    this.#write(SHOWN, this.chat.id);
  }

  remove(id) {
    this.#drop(id);
    if (this.chat.id === id) this.chat = this.chats[0] ?? this.begin();
    this.#write(SHOWN, this.chat.id);
  }

  // Stores one conversation. If another tab deleted it, it stays deleted. If another tab continued it, this one becomes
  // a separate conversation.
  save(chat = this.chat) {
    const first = chat.messages.find((message) => message.role === "user");
    if (first) chat.title = first.content.trim().split("\n")[0].slice(0, 60) || "New chat";
    const [there, known] = [this.#raw(CHAT + chat.id), this.#known.get(chat.id) ?? null];
    if (!chat.messages.length || (known !== null && there === null)) return;
    if (there !== known) this.#part(chat);
    while (!this.#keep(chat) && this.#forgetOldest(chat));
    while (this.chats.length > MOST && this.#forgetOldest(chat));
    if (there !== known) this.reload([chat]);
  }

  set(name, value) {
    this.settings = { ...this.settings, ...this.#read(SETTINGS, {}), [name]: value };
    this.#write(SETTINGS, this.settings);
  }

  #part(chat) {
    const shown = chat === this.chat;
    chat.id = newId();
    chat.begun = Date.now();
    if (shown) this.#write(SHOWN, chat.id);
  }

  #keep(chat) {
    const text = JSON.stringify(chat);
    const kept = this.#known.get(chat.id) === text || this.#put(CHAT + chat.id, text);
    if (kept) this.#known.set(chat.id, text);
    return kept;
  }

  // Reads all conversations, latest first, and keeps those that are not stored yet. One that has not changed, or is
  // `held`, stays the same object.
  #take(held) {
    const names = this.#names().filter((name) => name.startsWith(CHAT));
    const kept = names.map((name) => this.#chat(name, held)).filter((chat) => chat);
    const unkept = this.chats.filter((chat) => !this.#known.has(chat.id));
    this.chats = [...unkept, ...kept].sort((one, other) => other.begun - one.begun);
    this.settings = { ...this.settings, ...this.#read(SETTINGS, {}) };
  }

  #chat(name, held) {
    const [id, text] = [name.slice(CHAT.length), this.#raw(name)];
    const here = this.chats.find((chat) => chat.id === id);
    if (here && (held.includes(here) || this.#known.get(id) === text)) return here;
    const chat = this.#read(name, null);
    if (!isChat(chat) || chat.id !== id) return null;
    this.#known.set(id, text);
    return chat;
  }

  // Splits the single entry of an earlier version into one entry for each conversation.
  #split() {
    const chats = this.#read(LIST, []);
    this.#erase(LIST);
    for (const [place, chat] of (Array.isArray(chats) ? chats : []).entries()) {
      if (isChat(chat) && chat.messages.length) this.#write(CHAT + chat.id, { begun: -place, ...chat });
    }
  }

  #forgetOldest(kept) {
    const last = this.chats.findLast((chat) => chat !== kept && chat !== this.chat && this.#known.has(chat.id));
    if (last) this.#drop(last.id);
    return Boolean(last);
  }

  #drop(id) {
    this.chats = this.chats.filter((chat) => chat.id !== id);
    this.#erase(CHAT + id); // it stays in #known, so that an answer in progress does not store it again
  }

  #names() {
    try {
      return Array.from({ length: this.storage.length }, (_, place) => this.storage.key(place));
    } catch {
      return [];
    }
  }

  #raw(name) {
    try {
      return this.storage.getItem(name);
    } catch {
      return null; // the browser has no storage
    }
  }

  #read(name, otherwise) {
    try {
      return JSON.parse(this.#raw(name)) ?? otherwise;
    } catch {
      return otherwise;
    }
  }

  #write(name, value) {
    return this.#put(name, JSON.stringify(value));
  }

  #put(name, text) {
    try {
      this.storage.setItem(name, text);
      return true;
    } catch {
      return false; // the storage is full, or there is none
    }
  }

  #erase(name) {
    try {
      this.storage.removeItem(name);
    } catch {} // the browser has no storage
  }
}

const isChat = (chat) => Boolean(chat) && typeof chat.id === "string" && Array.isArray(chat.messages);

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
