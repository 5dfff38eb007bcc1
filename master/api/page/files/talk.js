// The answer in progress: requesting, receiving and stopping it. There is at most one.

import { answer } from "./api.js";

const REASONS = { length: "cut at its limit", tool_calls: "called a tool" };

export class Talk {
  constructor(store, changed) {
    this.store = store;
    this.changed = changed; // called with ("begun" | "grown" | "ended", message, pace)
    this.controller = null;
    this.chat = null; // the conversation of the answer
  }

  get live() {
    return this.controller !== null;
  }

  stop() {
    this.controller?.abort();
  }

  // Requests an answer to `chat` and appends it. Rejects with the server's error.
  async run(chat) {
    const message = { role: "assistant", content: "", thought: "", after: "" };
    const asked = this.#messages(chat);
    const pace = new Pace();
    chat.messages.push(message);
    this.controller = new AbortController();
    this.chat = chat;
    this.changed("begun", message);
    try {
      for await (const piece of answer(asked, this.store.settings, this.controller.signal)) {
        take(message, piece, pace);
        this.changed("grown", message, pace);
      }
    } catch (error) {
      message.after = this.controller.signal.aborted ? ["stopped", pace.text].filter(Boolean).join(" \u00b7 ") : "";
      if (this.controller.signal.aborted) return;
      message.after = "not answered";
      if (!message.content && !message.thought) chat.messages.splice(chat.messages.indexOf(message), 1);
      throw error;
    } finally {
      this.controller = this.chat = null;
      this.store.save(chat);
      this.changed("ended", message, pace);
    }
  }

  #messages(chat) {
    const said = chat.messages.filter(({ content }) => content).map(({ role, content }) => ({ role, content }));
    const system = this.store.settings.system.trim();
    return system ? [{ role: "system", content: system }, ...said] : said;
  }
}

// The speed of an answer: counted in pieces at first, and by the server at the end.
class Pace {
  #first = 0;
  #count = 0;
  text = "";

  hear() {
    this.#first ||= performance.now();
    this.#count += 1;
    const seconds = (performance.now() - this.#first) / 1000;
    if (seconds > 0.5) this.text = `${((this.#count - 1) / seconds).toFixed(1)} tokens/s`;
  }

  end(timings) {
    if (timings?.predicted_per_second) this.text = `${timings.predicted_per_second.toFixed(1)} tokens/s`;
  }
}

function take(message, piece, pace) {
  if (piece.reason) {
    pace.end(piece.timings);
    const made = piece.timings ? `${piece.timings.predicted_n} tokens` : "";
    message.after = [REASONS[piece.reason], made, pace.text].filter(Boolean).join(" \u00b7 ");
    return;
  }
  pace.hear();
  message.content += piece.text ?? "";
  message.thought += piece.thought ?? "";
}
