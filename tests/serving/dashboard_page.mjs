// Runs the dashboard's script over a document that is only a tree of nodes, and says what it did.
// Standard input: {"page": HTML, "data": [what /dashboard/data says, ...], "parts": [parts of a playground's answer, ...]}.
// Reading a field that the data lacks, or making HTML of text, is an error.
import { readFileSync } from "node:fs";
import vm from "node:vm";

class FakeNode {
  constructor(tag) {
    this.tag = tag;
    this.children = [];
    this.attributes = {};
    this.dataset = {};
    this.style = {};
    this.value = "";
    this.text = "";
    this.classList = { add: (name) => { this.className = `${this.className} ${name}`; } };
  }
  get textContent() { return this.text + this.children.map((child) => child.textContent ?? String(child)).join(""); }
  set textContent(value) { this.text = String(value); this.children = []; }
  set innerHTML(value) { throw new Error(`innerHTML was set to ${value}`); }
  set outerHTML(value) { throw new Error(`outerHTML was set to ${value}`); }
  insertAdjacentHTML() { throw new Error("insertAdjacentHTML was called"); }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.text = ""; this.children = nodes; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener() {}
  *tree() { yield this; for (const child of this.children) if (child instanceof FakeNode) yield* child.tree(); }
}

const roots = new Map();
function byId(id) {
  for (const root of roots.values()) for (const node of root.tree()) if (node.id === id) return node;
  if (!input.page.includes(`id="${id}"`)) throw new Error(`there is no element ${id}`);
  const node = new FakeNode("div");
  node.id = id;
  roots.set(id, node);
  return node;
}

const read = new Set();
function strict(value, path) {
  if (value === null || typeof value !== "object") return value;
  return new Proxy(value, {
    get(target, name) {
      if (typeof name === "symbol" || (Array.isArray(target) && !/^\d+$/.test(name))) return Reflect.get(target, name);
      if (!Object.hasOwn(target, name)) throw new Error(`the page reads ${path}.${name}, which the data lacks`);
      const inner = Array.isArray(target) ? `${path}[]` : `${path}.${name}`;
      read.add(inner);
      return strict(target[name], inner);
    },
  });
}

const input = JSON.parse(readFileSync(0, "utf8"));
const context = vm.createContext({
  document: {
    hidden: false, getElementById: byId, createElement: (tag) => new FakeNode(tag), createElementNS: (_, tag) => new FakeNode(tag),
  },
  sessionStorage: { getItem: () => null }, fetch: () => new Promise(() => {}), setTimeout: () => 0, clearTimeout: () => {},
  performance, TextDecoder, TextEncoder, AbortController, console,
});
vm.runInContext(/<script>(.*?)<\/script>/s.exec(input.page)[1], context);
for (const data of input.data) context.render(strict(data, "data"));
const answer = { tokens: 0, counts: {}, decoder: new TextDecoder(), start: 0, first: null, stats: null, finish: null };
for (const part of input.parts) context.takePart(answer, part);
context.showFigures(answer, true);
const texts = Object.fromEntries([...roots].map(([id, node]) => [id, node.textContent]));
const tokens = byId("answer").children.map((node) => [node.className, node.textContent, node.dataset.hint]);
const lines = [...byId("charts").tree()].filter((node) => node.attributes.class?.startsWith("line ")).map((node) => node.attributes.d);
console.log(JSON.stringify({ texts, tokens, lines, read: [...read] }));
