// Addresses in a model's text: which of them become links, and what the reader must see of them.
//
// An address with characters that may deceive a reader stays text. If a label could be read as an address, the link
// also shows its real target as the browser understands it, in ASCII (punycode).

import { make } from "./dom.js";

const UNSEEN = /[\p{C}\p{Z}\p{Default_Ignorable_Code_Point}]/u; // controls, bidi marks, blanks, invisible letters
const ENCODED = /(?:%[0-9a-f]{2})+/gi;
const HIDDEN = /[\p{Cc}\p{Bidi_Control}]/u; // not allowed in an address, even encoded
const HIDDEN_ALL = /[\p{Cc}\p{Bidi_Control}]/gu;
const WEB = /^https?:\/\/[^/?#@]+(?:[/?#]|$)/i; // without a user before the host
const MAIL = /^mailto:[^/\\?#]+/i;
// A text of words: letters, digits, marks and punctuation, but no letters or digits that look like a dot.
const WORDS = /^(?:(?![\u0660\u06f0\u0701\u0702\u1427\ua4f8-\ua4fd])[\p{L}\p{N}\p{M}]|[ \n;!?'"()&+*#\u2018-\u201d\u2013\u2014-]|[.,:](?=\s|$))*$/u;
const ALONE_BEFORE = /(?:^|[ \n])["'([{!\u2018\u201c]*$/; // text before a link that stands alone
const ALONE_AFTER = /^["')\]},;:.!?\u2019\u201d\u2026]*(?:[ \n]|$)/; // text after such a link
const MOST = 120; // longest address shown next to a label

// Returns a link, or `otherwise` (the source) as text if the address may not be a link.
export function link(source, label, otherwise) {
  const url = parsed(source);
  if (!url) return otherwise.replace(HIDDEN_ALL, "\ufffd");
  const target = { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer", dir: "auto" };
  const element = make("a", target, ...label);
  const beside = shown(url, element.textContent);
  if (!beside) return Object.assign(element, { place: placeOf(url) });
  return make("span", {}, element, " ", leads(beside));
}

// Shows the targets of links that touch other text: in [bank](...).com, the label looks like a part of an address.
export function showTouched(block) {
  for (const element of block.querySelectorAll("a")) {
    const words = element.closest("p, li, th, td, h1, h2, h3, h4, h5, h6");
    if (!element.place || !words || !WORDS.test(element.textContent)) continue;
    const walker = document.createTreeWalker(words, NodeFilter.SHOW_TEXT);
    walker.currentNode = element;
    const before = near(() => walker.previousNode(), (text, more) => more + text);
    walker.currentNode = element;
    while (walker.lastChild());
    const after = near(() => walker.nextNode(), (text, more) => text + more);
    if (!ALONE_BEFORE.test(before) || !ALONE_AFTER.test(after)) element.after(" ", leads(cut(element.place)));
  }
}

// Returns the text on one side of a link, up to the next space.
function near(next, joined) {
  let text = "";
  for (let node = next(); node && text.length < MOST; node = next()) {
    text = joined(text, node.data);
    if (/[ \n]/.test(node.data)) break;
  }
  return text;
}

const leads = (text) => make("bdi", { class: "leads", dir: "ltr" }, `(${text})`);
const placeOf = (url) => (url.protocol === "mailto:" ? url.pathname : url.host);

// Returns the address as the browser understands it; null if it may not be a link.
function parsed(source) {
  if (UNSEEN.test(source) || source.includes("\\") || !(WEB.test(source) || MAIL.test(source))) return null;
  if ((source.match(ENCODED) ?? []).some((part) => HIDDEN.test(decoded(part)))) return null;
  try {
    return new URL(source);
  } catch {
    return null;
  }
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return unescape(part); // bytes that are not UTF-8
  }
}

// Returns the target to show next to a label; nothing if the label is only words, or is the address itself.
function shown(url, label) {
  if (WORDS.test(label)) return "";
  const place = placeOf(url);
  const [, host, rest] = /^(?:https?:\/\/|mailto:)?([^/?#\s]*)(.*)$/is.exec(label);
  if (host.toLowerCase() !== place.toLowerCase()) return cut(place);
  const own = url.href.slice(url.href.indexOf(place, url.protocol.length) + place.length);
  return ["", "/", own, `${own}/`, readable(own)].includes(rest) ? "" : cut(place + own);
}

function readable(text) {
  try {
    return decodeURI(text);
  } catch {
    return text;
  }
}

function cut(text) {
  return text.length > MOST ? `${text.slice(0, MOST / 2)}\u2026${text.slice(-MOST / 2)}` : text;
}
