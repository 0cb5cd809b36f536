// The rounds of one answer, a column each: its tokens from below, each in the colour of whose it is.

import { color } from "./dom.js";

const WIDTH = 6,
  GAP = 1,
  MOST = 1000;

export class Strip {
  constructor(canvas, k) {
    this.canvas = canvas;
    this.height = k + 1;
    this.rounds = [];
    this.number = -1;
  }

  /** `shade`: a variable of the style sheet. */
  add(number, shade) {
    if (number !== this.number) {
      this.rounds.push([]);
      this.number = number;
      if (this.rounds.length > MOST) this.rounds.shift();
    }
    const round = this.rounds.at(-1);
    round.push(shade);
    this.height = Math.max(this.height, round.length);
  }

  draw() {
    const { canvas } = this,
      ratio = devicePixelRatio;
    const width = canvas.clientWidth,
      height = canvas.clientHeight;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const shades = new Map();
    const cell = (height - 4) / this.height;
    const shown = this.rounds.slice(-Math.floor((width - 4) / (WIDTH + GAP)));
    shown.forEach((round, x) =>
      round.forEach((name, y) => {
        if (!shades.has(name)) shades.set(name, color(name));
        context.fillStyle = shades.get(name);
        context.fillRect(2 + x * (WIDTH + GAP), height - 2 - (y + 1) * cell + GAP, WIDTH, Math.max(1, cell - GAP));
      }),
    );
  }
}
