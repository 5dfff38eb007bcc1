// Renders the Markdown that models write as elements. Text becomes text nodes, never HTML; links lead only to the web.
// Rendering a growing text again is cheap, because only blocks with changed source are rebuilt.

import { copyText, make } from "./dom.js";
import { link, showTouched } from "./links.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}>\s?/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = new RegExp([
  "(?<ticks>`+)(?<code>.+?)\\k<ticks>(?!`)",
  "\\\\(?<escaped>[\\\\`*_{}\\[\\]()#+.!~|>-])",
  "\\[(?<label>[^\\]\\n]{1,300})\\]\\((?<url>[^\\s)]{1,2000})(?:\\s+\"[^\"]*\")?\\)",
  "\\*\\*(?<bold>\\S(?:.*?\\S)?)\\*\\*",
  "~~(?<struck>\\S(?:.*?\\S)?)~~",
  "\\*(?<italic>[^\\s*](?:[^*]*[^\\s*])?)\\*",
  "\\b_(?<under>[^\\s_](?:[^_]*[^\\s_])?)_\\b",
  "(?<bare>https?://[^\\s<>\"')\\]]*[^\\s<>\"')\\].,;:!?*])", // punctuation at the end is not part of the address
].join("|"), "s");
const DEEPEST = 8; // levels of nested quotes

export function render(element, text) {
  const blocks = split(text);
  blocks.forEach((block, index) => {
    const old = element.children[index];
    if (old?.source === block.source) return;
    const fresh = BUILD[block.kind](block);
    showTouched(fresh);
    fresh.source = block.source;
    if (old) old.replaceWith(fresh);
    else element.append(fresh);
  });
  while (element.children.length > blocks.length) element.lastChild.remove();
}

function split(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) { at += 1; continue; }
    const kind = kindOf(lines, at);
    const end = ENDS[kind](lines, at);
    blocks.push({ kind, lines: lines.slice(at, end), source: `${kind}\n${lines.slice(at, end).join("\n")}` });
    at = end;
  }
  return blocks;
}

function kindOf(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (line.includes("|") && lines[at + 1]?.includes("|") && DIVIDER.test(lines[at + 1])) return "table";
  return "paragraph";
}

function until(lines, at, stops) {
  let end = at + 1;
  while (end < lines.length && !stops(lines[end], end)) end += 1;
  return end;
}

const ENDS = {
  code(lines, at) {
    const [, fence] = FENCE.exec(lines[at]);
    const closed = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
    return Math.min(until(lines, at, closed) + 1, lines.length);
  },
  heading: (lines, at) => at + 1,
  rule: (lines, at) => at + 1,
  quote: (lines, at) => until(lines, at, (line) => !QUOTE.test(line)),
  list(lines, at) {
    const ends = (line, index) => {
      if (line.trim()) return !ITEM.test(line) && !/^\s{2,}/.test(line) && !lines[index - 1].trim();
      const next = lines.slice(index + 1).find((later) => later.trim());
      return next === undefined || (!ITEM.test(next) && !/^\s{2,}/.test(next));
    };
    return until(lines, at, ends);
  },
  table: (lines, at) => until(lines, at, (line) => !line.includes("|")),
  paragraph: (lines, at) => until(lines, at, (line, index) => !line.trim() || kindOf(lines, index) !== "paragraph"),
};

const BUILD = {
  code({ lines }) {
    const [, fence, language] = FENCE.exec(lines[0]);
    const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence);
    const text = lines.slice(1, closed ? -1 : undefined).join("\n");
    const copy = make("button", { type: "button", onclick: () => copyText(text, copy) }, "Copy");
    const name = language || "code";
    const bar = make("div", { class: "bar" }, make("span", {}, name), copy);
    return make("div", { class: "code" }, bar, make("pre", { tabindex: 0, role: "group", "aria-label": name }, make("code", {}, text)));
  },
  heading({ lines }) {
    const [, marks, text] = HEADING.exec(lines[0]);
    return make(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text));
  },
  rule: () => make("hr"),
  quote({ lines, depth = 0 }) {
    const quote = make("blockquote");
    const text = lines.map((line) => line.replace(QUOTE, "")).join("\n");
    for (const block of split(text)) {
      const deep = block.kind === "quote" && depth + 1 >= DEEPEST;
      quote.append(BUILD[deep ? "paragraph" : block.kind]({ ...block, depth: depth + 1 }));
    }
    return quote;
  },
  list: ({ lines }) => list(lines),
  table({ lines }) {
    const [head, , ...rows] = lines.map(cells);
    const line = (tag, texts) => make("tr", {}, ...texts.map((text) => make(tag, {}, ...inline(text))));
    const table = make("table", {}, make("thead", {}, line("th", head)));
    table.append(make("tbody", {}, ...rows.map((texts) => line("td", texts))));
    return make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" }, table);
  },
  paragraph: ({ lines }) => make("p", {}, ...inline(lines.join("\n"))),
};

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

// Returns the items of a list by indentation, each with its nested lists, code and paragraphs.
function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const element = make(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {});
  let at = 0;
  while (at < lines.length) {
    const [, , own, text] = ITEM.exec(lines[at]);
    const end = until(lines, at, (line) => {
      const item = ITEM.exec(line);
      return item !== null && item[1].length <= indent.length;
    });
    const inner = lines.slice(at + 1, end).map((line) => line.replace(/^\s+/, (blank) => (
      blank.slice(Math.min(blank.length, indent.length + own.length + 1)))));
    const item = make("li", {}, ...inline(text));
    for (const block of split(inner.join("\n"))) item.append(BUILD[block.kind](block));
    element.append(item);
    at = end;
  }
  return element;
}

// `within`: inside a link, which cannot have another one in it.
function inline(text, within = false) {
  const nodes = [];
  let rest = text;
  for (let found = INLINE.exec(rest); found; found = INLINE.exec(rest)) {
    if (found.index) nodes.push(rest.slice(0, found.index));
    nodes.push(...span(found, within));
    rest = rest.slice(found.index + found[0].length);
  }
  if (rest) nodes.push(rest);
  return nodes;
}

function span({ 0: all, groups }, within) {
  if (groups.code !== undefined) return [make("code", {}, groups.code.trim() || groups.code)];
  if (groups.escaped) return [groups.escaped];
  if (groups.label) {
    const label = inline(groups.label, true);
    return within ? label : [link(groups.url, label, all)];
  }
  if (groups.bold) return [make("strong", {}, ...inline(groups.bold, within))];
  if (groups.struck) return [make("s", {}, ...inline(groups.struck, within))];
  if (groups.italic || groups.under) return [make("em", {}, ...inline(groups.italic ?? groups.under, within))];
  return [within ? groups.bare : link(groups.bare, [groups.bare], all)];
}
