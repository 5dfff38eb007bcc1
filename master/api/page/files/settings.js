// The fields of the settings. They store what is typed, and show what another tab stores.

import { $ } from "./dom.js";

const NAMES = ["key", "system", "temperature"];

export class Settings {
  constructor(store, rekeyed) {
    this.store = store;
    this.rekeyed = rekeyed; // called when the key has changed
    this.key = store.settings.key;
    for (const name of NAMES) $(name).addEventListener("change", () => this.#take(name));
    this.show();
  }

  show() {
    for (const name of NAMES) if ($(name) !== document.activeElement) $(name).value = this.store.settings[name];
    const { key } = this.store.settings;
    const before = this.key;
    this.key = key;
    if (key !== before) this.rekeyed();
  }

  #take(name) {
    this.store.set(name, name === "key" ? $(name).value.trim() : $(name).value);
    this.show();
  }
}
