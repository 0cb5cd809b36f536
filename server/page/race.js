// The same request at two depths: whether the texts are equal so far, and which was done sooner.

import { announce, byId, make } from "./dom.js";

export class Race {
  constructor(panes) {
    this.panes = panes;
    this.same = 0;
    this.look();
  }

  get differs() {
    const lengths = this.panes.map((pane) => pane.ids.length);
    const isShort =
      this.panes.every((pane) => pane.ended && !pane.isStopped) && lengths.some((length) => length !== lengths[0]);
    return this.same < Math.min(...lengths) || isShort;
  }

  look() {
    if (this.panes.length < 2) return tell("none", "");
    const [a, b] = this.panes.map((pane) => pane.ids);
    while (this.same < a.length && this.same < b.length && a[this.same] === b[this.same]) this.same++;
    if (this.differs) tell("differs", `they differ at token ${this.same + 1}`);
    else if (this.same) tell("equal", `equal so far, ${count(this.same)}`);
    else tell("none", "");
  }

  finish() {
    if (this.panes.some((pane) => pane.error.textContent)) return tell("none", "");
    const told = this.panes.map(({ name, length, speed }) => {
      const figures = [length?.toFixed(2) ?? "no", speed?.toFixed(0) ?? "no"];
      return `${name}: ${figures[0]} tokens a round, ${figures[1]} tokens a second.`;
    });
    if (this.panes.length < 2) return announce(`Done, ${count(this.panes[0].ids.length)}. ${told[0]}`);
    this.look();
    if (!this.differs) {
      const stopped = this.panes.some((pane) => pane.isStopped) ? "stopped; equal for" : "equal,";
      tell("equal", `${stopped} ${count(this.same)}`, this.faster());
    }
    announce(`Done: ${byId("verdict").textContent}. ${told.join(" ")}`);
  }

  /** What speculation brought, if both ran at once to the end. */
  faster() {
    const [plain, drafted] = this.panes;
    if (!plain.first || !drafted.first || this.panes.some((pane) => pane.isStopped)) return "";
    if (plain.first > drafted.last || drafted.first > plain.last) return " · one after the other: no place for both";
    const [slow, fast] = this.panes.map((pane) => pane.last - pane.began);
    const took = (time) => `${(time / 1000).toFixed(1)} s`;
    return ` · ${took(slow)} and ${took(fast)}: ${(slow / fast).toFixed(2)} × as fast`;
  }
}

const count = (number) => `${number} token${number === 1 ? "" : "s"}`;

function tell(verdict, text, more = "") {
  const element = byId("verdict");
  element.dataset.verdict = verdict;
  element.replaceChildren(text, ...(more ? [make("small", { text: more })] : []));
}
