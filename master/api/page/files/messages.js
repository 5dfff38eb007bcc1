// A conversation as elements: messages with their buttons. `actions` does the work of the buttons.

import { copyText, make, setText } from "./dom.js";
import { render } from "./markdown.js";

const NEAR = 80; // pixels: closer to the end, the view follows the answer

export class Messages {
  constructor(list, scroll, actions) {
    this.list = list;
    this.scroll = scroll;
    this.actions = actions; // retry(index), edit(index, text)
    this.items = [];
  }

  show(messages) {
    this.items = messages.map((message, index) => this.#item(message, index));
    this.list.replaceChildren(...this.items);
    this.toEnd();
  }

  add(message) {
    const item = this.#item(message, this.items.length);
    this.items.push(item);
    this.list.append(item);
    this.toEnd();
  }

  // Shows the last message again, because it has grown or ended.
  update(message, live) {
    const item = this.items.at(-1);
    if (!item) return;
    const follows = this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight < NEAR;
    fill(item, message, live);
    if (follows) this.toEnd();
  }

  toEnd() {
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  #item(message, index) {
    const mine = message.role === "user";
    const body = make("div", { class: "body" });
    const said = make("p", { class: "after quiet" });
    const copy = make("button", { type: "button", onclick: () => copyText(message.content, copy) }, "Copy");
    const act = mine
      ? make("button", { type: "button", onclick: () => this.#edit(item, message, index) }, "Edit")
      : make("button", { type: "button", onclick: () => this.actions.retry(index) }, "Retry");
    const tools = make("div", { class: "tools" }, copy, act, said);
    const item = make("li", { class: mine ? "mine" : "answer" }, make("h2", { class: "unseen" }, mine ? "You" : "Answer"));
    item.append(body, tools);
    fill(item, message, false);
    return item;
  }

  #edit(item, message, index) {
    const rows = Math.min(12, message.content.split("\n").length + 1);
    const field = make("textarea", { "aria-label": "Edit the message", rows });
    field.value = message.content;
    const back = () => {
      form.replaceWith(body);
      tools.hidden = false;
      tools.children[1].focus();
    };
    const form = make("form", { class: "edit" }, field, make("div", { class: "tools" },
      make("button", { type: "submit", class: "strong" }, "Send"), make("button", { type: "button", onclick: back }, "Cancel")));
    const [body, tools] = [item.querySelector(".body"), item.querySelector(".tools")];
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.actions.edit(index, field.value.trim());
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") back();
      if (isSend(event)) form.requestSubmit();
    });
    body.replaceWith(form);
    tools.hidden = true;
    field.focus();
  }
}

// Enter sends, Shift+Enter begins a new line; Enter that ends a composed character does neither.
export function isSend(event) {
  const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (sends) event.preventDefault();
  return sends;
}

function fill(item, message, live) {
  const body = item.querySelector(".body");
  item.classList.toggle("live", live);
  if (message.role === "user") {
    if (body) setText(body, message.content);
    return;
  }
  thoughts(body, message);
  let text = body.querySelector(":scope > .text");
  if (!text) body.append((text = make("div", { class: "text" })));
  render(text, message.content);
  setText(item.querySelector(".after"), message.after ?? "");
}

function thoughts(body, message) {
  if (!message.thought) return;
  let part = body.querySelector(":scope > .thought");
  if (!part) body.prepend((part = make("details", { class: "thought" }, make("summary", {}, "Thoughts"), make("div"))));
  setText(part.lastChild, message.thought);
}
