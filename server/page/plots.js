// One plot: a caption with the values under the pointer or now, and uPlot's canvas below.

import { color, make } from "./dom.js";

/** The shortest stretch of time that is drawn, in seconds. */
const SHORTEST = 60;

export class Plot {
  /**
   * `lines`: {label, color: () => "#rrggbb", dash?, value: (point, watch) => number or null}. `format` writes a value,
   * `top` is the least upper end of its axis.
   */
  constructor(parent, { title, unit, lines, format, top = 1, whole = false }) {
    Object.assign(this, { title, lines, format, top, whole });
    this.values = make("span");
    this.place = make("div", { className: "plot", role: "img", "aria-label": `${title}: nothing yet` });
    const caption = make("figcaption", {}, make("h3", {}, title, make("small", { text: unit })), this.values);
    parent.append(make("figure", {}, caption, this.place));
    new ResizeObserver(() => this.resize()).observe(this.place);
  }

  draw(watch) {
    const until = watch.points.at(-1)?.time;
    this.data = [
      watch.points.map((point) => point.time - until),
      ...this.lines.map(({ value }) => watch.points.map((point) => value(point, watch))),
    ];
    if (this.drawn) this.drawn.setData(this.data);
    else if (this.place.clientWidth) this.make();
    this.tell();
  }

  /** Colours are those of the theme at this moment. */
  make() {
    this.drawn?.destroy();
    const soft = color("--soft"),
      line = color("--line"),
      font = "11px system-ui, sans-serif";
    const axis = { stroke: soft, font, grid: { stroke: line, width: 1 }, ticks: { show: false } };
    const whole = this.whole ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] } : {};
    const options = {
      ...this.size(),
      legend: { show: false },
      padding: [10, 16, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
      scales: {
        x: { time: false, range: () => [Math.min(this.data[0][0] ?? 0, -SHORTEST), 0] },
        y: { range: (_, low, high) => [0, Math.max(this.top, (high ?? 0) * 1.08)] },
      },
      axes: [
        {
          ...axis,
          grid: { show: false },
          size: 26,
          gap: 6,
          space: 60,
          values: (_, ticks) => ticks.map(ago),
          incrs: [10, 15, 30, 60, 120, 300],
        },
        { ...axis, ...whole, size: 54, space: 34, values: (_, ticks) => ticks.map((tick) => this.format(tick)) },
      ],
      series: [
        {},
        ...this.lines.map((entry) => ({
          label: entry.label,
          stroke: entry.color(),
          width: entry.dash ? 1.25 : 1.75,
          dash: entry.dash,
          points: { size: 5, show: false, filter: alone },
        })),
      ],
      hooks: { setCursor: [(drawn) => this.tell(drawn.cursor.idx)] },
    };
    this.drawn = new uPlot(options, this.data, this.place);
  }

  size() {
    return { width: this.place.clientWidth, height: this.place.clientHeight };
  }

  resize() {
    if (!this.place.clientWidth || !this.data) return;
    if (this.drawn) this.drawn.setSize(this.size());
    else this.make();
  }

  /** The values at a point, by default the newest of each line. */
  tell(index = null) {
    const told = this.lines.map((entry, i) => {
      const column = this.data[i + 1];
      return [entry, index === null ? column.findLast((value) => value !== null) : column[index]];
    });
    this.values.replaceChildren(
      ...told.map(([entry, value]) =>
        make(
          "span",
          { className: "now" },
          swatch(entry),
          `${entry.label} `,
          make("b", { text: value == null ? "–" : this.format(value) }),
          " ",
        ),
      ),
    );
    if (index === null)
      this.place.setAttribute(
        "aria-label",
        `${this.title}. ${told.map((pair, i) => this.heard(...pair, i)).join(" ")}`,
      );
  }

  heard({ label, dash }, value, i) {
    if (value == null) return `${label}: nothing yet.`;
    if (dash) return `${label}: ${this.format(value)}.`;
    const known = this.data[i + 1].filter((one) => one !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)].map(this.format);
    return `${label}: ${this.format(value)} now, from ${low} to ${high}.`;
  }
}

function ago(tick) {
  const past = Math.round(-tick);
  if (past <= 0) return "now";
  return past % 60 === 0 ? `−${past / 60} min` : `−${past} s`;
}

/** Points that no line shows: nothing stands before or after them. */
function alone(drawn, series) {
  const column = drawn.data[series];
  return column.flatMap((value, i) => (value != null && column[i - 1] == null && column[i + 1] == null ? [i] : []));
}

/** The line as it is drawn. */
function swatch(entry) {
  const canvas = make("canvas", { width: 32, height: 16, "aria-hidden": "true" }),
    context = canvas.getContext("2d");
  context.strokeStyle = entry.color();
  context.lineWidth = 4;
  context.setLineDash(entry.dash ? [8, 5] : []);
  context.beginPath();
  context.moveTo(0, 8);
  context.lineTo(32, 8);
  context.stroke();
  return canvas;
}
