// The panel of nodes: share, memory and time per token of each. It is updated once a second while it is visible.

import { getJson } from "./api.js";
import { $, make, setText } from "./dom.js";

const EVERY = 1000; // milliseconds
const PARTS = [["compute_ms", "compute"], ["network_ms", "others"], ["disk_ms", "disk"], ["hop_ms", "stages"]];

export class House {
  constructor(panel, store, shown) {
    this.panel = panel;
    this.store = store;
    this.shown = shown; // called with each update
    this.cards = [];
    this.timer = null;
    this.asking = false;
    this.ready = false; // becomes true when the server has accepted the key
    document.addEventListener("visibilitychange", () => this.wake());
  }

  get visible() {
    return !document.hidden && this.panel.getClientRects().length > 0;
  }

  wake() {
    clearTimeout(this.timer);
    if (this.ready && this.visible && !this.asking) this.#ask();
  }

  async #ask() {
    this.asking = true;
    try {
      this.#show(await getJson("/house", this.store.settings.key));
    } catch (error) {
      setText($("house-line"), error.status === 401 ? "Enter the API key to see the house." : "The server does not answer.");
    }
    this.asking = false;
    if (this.visible) this.timer = setTimeout(() => this.wake(), EVERY);
  }

  #show(house) {
    this.shown(house);
    const nodes = house.nodes ?? [];
    const busy = [house.running ? `${house.running} answering` : "idle", house.waiting ? `${house.waiting} waiting` : ""];
    const sums = nodes.length > 1 ? [`sums: ${house.collective}, ${house.wire}`] : [];
    const stages = stagesOf(nodes);
    if (stages.length > 1) sums.push(`${house.steps.in_flight} of ${house.steps.most} steps in flight`);
    const count = `${nodes.length} node${nodes.length === 1 ? "" : "s"}`;
    setText($("house-line"), house.problem ?? [count, ...busy, ...sums].filter(Boolean).join(" \u00b7 "));
    this.panel.classList.toggle("trouble", Boolean(house.problem));
    this.#load(house);
    while (this.cards.length > nodes.length) this.cards.pop().element.remove();
    nodes.forEach((node, rank) => {
      if (!this.cards[rank]) $("nodes").append((this.cards[rank] = new Card()).element);
      this.cards[rank].show(node, house.whole, Math.max(...nodes.map(perToken)), stages);
    });
  }

  #load({ pages }) {
    this.memory ??= new Bar("Context memory", "pages");
    if (!this.memory.element.isConnected) $("load").append(this.memory.element);
    if (!pages) return;
    const held = pages.held * pages.tokens;
    this.memory.show([[0, pages.held / pages.total, "pages"]], `${held} of ${pages.total * pages.tokens} tokens`);
  }
}

// A figure with its name, its value, and a bar with coloured parts: [from, to, kind], from 0 to 1.
class Bar {
  constructor(name) {
    this.value = make("span", { class: "value" });
    this.track = make("div", { class: "track", "aria-hidden": "true" });
    this.element = make("div", { class: "figure" }, make("p", {}, make("span", {}, name), this.value), this.track);
  }

  show(parts, text) {
    setText(this.value, text);
    while (this.track.children.length > parts.length) this.track.lastChild.remove();
    parts.forEach(([from, to, kind], index) => {
      const part = this.track.children[index] ?? this.track.appendChild(make("i"));
      part.className = kind;
      part.style.left = `${100 * from}%`;
      part.style.width = `${100 * Math.max(0, Math.min(1, to) - from)}%`;
    });
  }
}

class Card {
  constructor() {
    this.name = make("h3");
    this.bars = {
      layers: new Bar("Layers"), heads: new Bar("Attention heads"), neurons: new Bar("Neurons"), experts: new Bar("Experts"),
      memory: new Bar("Memory"), weights: new Bar("Weights in memory"),
      window: new Bar("Streamed blocks read ahead"), time: new Bar("Time per token"),
    };
    this.legend = make("p", { class: "legend" }, ...PARTS.map(([, kind]) => make("span", { class: kind })));
    this.note = make("p", { class: "quiet" });
    this.element = make("li", { class: "card" }, this.name, 
      ...Object.values(this.bars).map((bar) => bar.element), this.legend, this.note);
  }

  show(node, whole, slowest, stages) {
    const own = node.layers.map((layers) => stages.indexOf(String(layers)) + 1);
    const staged = stages.length > 1 && own.length;
    setText(this.name, staged ? `${node.name}, stage ${own.join(" and ")} of ${stages.length}` : node.name);
    this.#layers(node.layers, stages.length > 1 ? whole.layers : 0);
    this.#range("heads", node.heads, whole.heads);
    const wide = whole.neurons && node.neurons[1] <= whole.neurons && !whole.experts;
    this.#range("neurons", node.neurons, wide ? whole.neurons : whole.expert_neurons || whole.neurons);
    this.#range("experts", node.experts, whole.experts);
    const { bars } = this;
    const kept = Math.min(1, node.resident_bytes / Math.max(1, node.planned_bytes));
    const used = Math.min(1, node.used_bytes / Math.max(1, node.planned_bytes));
    bars.memory.show([[0, Math.min(kept, used), "kept"], [Math.min(kept, used), used, "other"]],
      `${size(node.used_bytes)} of ${size(node.planned_bytes)} planned`);
    bars.weights.element.hidden = node.resident_bytes >= node.weight_bytes;
    bars.weights.show([[0, node.resident_bytes / Math.max(1, node.weight_bytes), "kept"]],
      `${size(node.resident_bytes)} of ${size(node.weight_bytes)}`);
    this.#window(node.window);
    this.#time(node, slowest);
    setText(this.note, notes(node));
  }

  #range(name, [first, last], whole) {
    this.bars[name].element.hidden = !whole;
    const text = last > first ? `${first}\u2013${last - 1} of ${whole}` : "none";
    if (whole) this.bars[name].show([[first / whole, last / whole, "share"]], text);
  }

  #layers(ranges, whole) {
    this.bars.layers.element.hidden = !whole;
    const text = ranges.map(([first, last]) => `${first}\u2013${last - 1}`).join(", ");
    this.bars.layers.show(ranges.map(([first, last]) => [first / whole, last / whole, "share"]), text ? `${text} of ${whole}` : "none");
  }

  // The bar of streamed blocks, in their order: from the next one on, those that are already in memory.
  #window({ next, ready, blocks } = { blocks: 0 }) {
    this.bars.window.element.hidden = !blocks;
    if (!blocks) return;
    const end = next + ready;
    const parts = [[next / blocks, Math.min(end, blocks) / blocks, "share"]];
    if (end > blocks) parts.push([0, (end - blocks) / blocks, "share"]);
    this.bars.window.show(parts, `${ready} of ${blocks} blocks read ahead`);
  }

  #time(node, slowest) {
    let at = 0;
    const parts = PARTS.map(([field, kind]) => [at, (at += node[field] / Math.max(slowest, 1e-9)), kind]);
    this.bars.time.show(parts, perToken(node) ? `${perToken(node).toFixed(1)} ms` : "nothing yet");
    PARTS.forEach(([field, kind], index) => setText(this.legend.children[index], `${kind} ${node[field].toFixed(1)}`));
    this.legend.lastChild.hidden = !node.hop_ms;
  }
}

// The layers of each stage, as text, in the order of the layers.
function stagesOf(nodes) {
  const held = nodes.flatMap((node) => node.layers);
  return [...new Set(held.sort(([one], [other]) => one - other).map(String))];
}

const perToken = (node) => PARTS.reduce((sum, [field]) => sum + node[field], 0);

function notes(node) {
  const sent = node.sent_bytes || node.received_bytes
    ? `sends ${size(node.sent_bytes)}, receives ${size(node.received_bytes)} a token` : "";
  const read = node.streamed_bytes ? `reads ${size(node.streamed_bytes)} a token at ${node.disk_mb_per_s.toFixed(0)} MB/s` : "";
  return [links(node.links), sent, read, node.accelerator].filter(Boolean).join("; ");
}

function links(all) {
  if (!all.length) return "";
  const times = all.map((one) => one.latency_ms);
  const [low, high] = [Math.min(...times), Math.max(...times)].map((value) => value.toPrecision(2));
  const slowest = Math.min(...all.map((one) => one.mb_per_s));
  return `links of ${low === high ? low : `${low}\u2013${high}`} ms and ${slowest.toFixed(0)} MB/s`;
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB"];
  const power = Math.min(3, Math.floor(Math.log10(Math.max(1, bytes)) / 3));
  const value = bytes / 1000 ** power;
  return `${value >= 100 || !power ? value.toFixed(0) : value.toFixed(1)} ${units[power]}`;
}
