// One answer as it comes: its text token by token, its rounds, its figures.

import { byId, make, seconds, step } from "./dom.js";
import { Strip } from "./strip.js";

const MOST_TOKENS = 5000;
/** Characters; what comes after is counted and compared, not shown. */
const MOST_CHARACTERS = 200_000;

export class Pane {
  /** `k`: what it asks for, `scale`: the k that colours go by. */
  constructor(k, scale) {
    const part = byId("pane").content.cloneNode(true);
    this.element = part.firstElementChild;
    this.text = this.element.querySelector(".text");
    this.error = this.element.querySelector(".error");
    this.canvas = this.element.querySelector("canvas");
    this.k = k;
    this.scale = scale;
    this.name = `k = ${k}`;
    const what = k ? `${k} draft${k === 1 ? "" : "s"} a round` : "the model alone";
    this.element.querySelector("h3").append(this.name, make("small", { text: what }));
    this.element.setAttribute("aria-label", this.name);
    this.text.setAttribute("aria-label", `The answer at ${this.name}. Left and right arrow go along its tokens.`);
    this.begin();
  }

  begin() {
    this.tokens = [];
    this.ids = [];
    this.rounds = new Map();
    this.content = "";
    this.characters = 0;
    this.strip = new Strip(this.canvas, this.k);
    this.fresh = [];
    this.began = performance.now();
    this.first = this.last = null;
    this.ended = false;
  }

  /** Tokens of one event, as pilotfish traces them, with their ids and log-probabilities. */
  add(tokens) {
    if (!tokens.length) return;
    this.last = performance.now();
    this.first ??= this.last;
    for (const token of tokens) {
      this.ids.push(token.id);
      if (token.round) this.rounds.set(token.round, (this.rounds.get(token.round) ?? 0) + 1);
      this.strip.add(token.round, this.shade(token));
      if (this.tokens.length < MOST_TOKENS) this.tokens.push(token);
      this.fresh.push(token);
    }
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  shade(token) {
    if (token.origin === "grammar") return "--grammar-line";
    return token.origin === "draft" ? `--d${step(token.draft, this.scale)}` : "--trunk";
  }

  draw() {
    this.frame = null;
    const { text } = this,
      follows = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    text.append(...this.nodes(this.fresh));
    this.fresh = [];
    if (follows) text.scrollTop = text.scrollHeight;
    this.strip.draw();
    this.figures();
  }

  nodes(tokens) {
    const made = document.createDocumentFragment();
    let plain = "";
    for (const token of tokens) {
      if (this.characters > MOST_CHARACTERS) break;
      this.characters += token.text.length;
      const at = this.shown ?? 0;
      if (at < MOST_TOKENS) made.append(this.span(token, at));
      else plain += token.text;
      this.shown = at + 1;
    }
    if (plain) made.append(plain);
    if (this.characters > MOST_CHARACTERS && !this.isCut) {
      this.isCut = true;
      made.append(make("span", { className: "note", text: " … the rest is counted and compared, not shown." }));
    }
    return made.childNodes;
  }

  span(token, at) {
    const before = this.tokens[at - 1];
    const names = ["t"];
    if (token.origin === "draft") names.push(`d${step(token.draft, this.scale)}`);
    if (token.origin === "grammar") names.push("grammar");
    if (before && this.k && before.round !== token.round) names.push("starts");
    if (!token.text && token.isLast) names.push("end");
    return make("span", { className: names.join(" "), text: token.text, "data-at": at });
  }

  get length() {
    const total = [...this.rounds.values()].reduce((sum, size) => sum + size, 0);
    return this.rounds.size ? total / this.rounds.size : null;
  }

  get speed() {
    return this.ids.length > 1 && this.last > this.first
      ? ((this.ids.length - 1) * 1000) / (this.last - this.first)
      : null;
  }

  figures() {
    const set = (name, value) => (this.element.querySelector(`[data-figure="${name}"]`).textContent = value ?? "–");
    set("tokens", this.ids.length);
    set("speed", this.speed?.toFixed(1));
    set("first", this.first && seconds((this.first - this.began) / 1000));
    set("length", this.length?.toFixed(2));
  }

  /** No token comes any more. */
  end() {
    this.ended = true;
    if (this.frame) cancelAnimationFrame(this.frame);
    this.draw();
    const length = this.length?.toFixed(2) ?? "no";
    this.canvas.setAttribute("aria-label", `${this.rounds.size} rounds, ${length} tokens a round`);
  }

  fail(message) {
    this.error.textContent = message;
    this.end();
  }
}
