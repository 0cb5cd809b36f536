// Watch: the last minutes from the server's own numbers, and how it is in words.

import { get } from "./api.js";
import { between, byId, color, make, percent, seconds } from "./dom.js";
import { Plot } from "./plots.js";
import { sentences } from "./words.js";

let plots = null,
  drawnFor = null,
  timer = null,
  isShown = false,
  onRefused = () => {},
  newest = null;

export function startWatching({ onUnauthorized }) {
  onRefused = onUnauthorized;
  document.addEventListener("visibilitychange", () => watching(isShown));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    plots?.forEach((plot) => plot.data && plot.make());
    if (newest) draw(newest);
  });
}

/** Asks as long as it is looked at. */
export function watching(is) {
  isShown = is;
  clearTimeout(timer);
  if (isShown && !document.hidden) look();
}

async function look() {
  let pause = 2;
  try {
    const [news, health] = await Promise.all([get(`v1/watch?after=${since()}`), get("health", { any: true })]);
    const watch = withOlder(news);
    // 503 while the engine loads or has failed
    const capacity = await get("v1/capacity").catch(() => null);
    pause = watch.interval_seconds;
    newest = watch;
    byId("watch-error").textContent = "";
    tell(sentences(health, watch, capacity));
    if (capacity) table(capacity);
    draw(watch);
  } catch (error) {
    byId("watch-error").textContent = error.message;
    if (error.status === 401) {
      onRefused(error.message);
      pause = 10;
    }
  }
  clearTimeout(timer);
  if (isShown && !document.hidden) timer = setTimeout(look, pause * 1000);
}

const since = () => newest?.points.at(-1)?.time ?? 0;

/** The news with the points that were there before, as far as they are told of. */
function withOlder(news) {
  const older = newest?.points.filter((point) => point.time > news.time - news.span_seconds) ?? [];
  return { ...news, points: [...older, ...news.points] };
}

function tell(lines) {
  byId("words").replaceChildren(...lines.map(([level, text]) => make("li", { text, "data-level": level })));
}

// -- plots -----------------------------------------------------------------------------------------------------------

const number = (value) =>
  value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
const first = () => color("--accent"),
  second = () => color("--second"),
  limit = () => color("--limit");

function draw(watch) {
  const k = watch.num_speculative_tokens ?? 0;
  if (drawnFor !== k) {
    byId("plots").replaceChildren();
    plots = kinds(k).map((kind) => new Plot(byId("plots"), kind));
    drawnFor = k;
  }
  plots.forEach((plot) => plot.draw(watch));
}

function kinds(k) {
  const latency = (title, unit, of) => ({
    title,
    unit,
    format: seconds,
    top: 0.001,
    lines: [
      { label: "half within", color: first, value: (point) => of(point)?.median ?? null },
      { label: "95 % within", color: second, value: (point) => of(point)?.p95 ?? null },
    ],
  });
  const depth = (i) => () => between(color("--line-from"), color("--line-to"), k <= 1 ? 0.4 : i / (k - 1));
  const speculation = [
    {
      title: "Acceptance length",
      unit: "tokens a round",
      format: (value) => value.toFixed(2),
      top: k + 1,
      lines: [
        { label: "measured", color: first, value: (point) => point.acceptance_length },
        { label: "break-even", color: second, dash: [3, 4], value: (point) => point.break_even },
        { label: "k + 1", color: limit, dash: [8, 5], value: () => k + 1 },
      ],
    },
    {
      title: "Accepted, by position",
      unit: "share of the drafts offered",
      format: percent,
      top: 1,
      lines: Array.from({ length: k }, (_, i) => ({
        label: `draft ${i + 1}`,
        color: depth(i),
        value: (point) => point.accepted[i] ?? null,
      })),
    },
  ];
  return [
    ...(k ? speculation : []),
    {
      title: "Tokens",
      unit: "a second",
      format: number,
      top: 1,
      lines: [
        { label: "written", color: first, value: (point) => point.tokens_per_second },
        { label: "read of prompts", color: second, value: (point) => point.prompt_tokens_per_second },
      ],
    },
    {
      title: "Sequences",
      unit: "now",
      format: (value) => String(Math.round(value)),
      top: 1,
      whole: true,
      lines: [
        { label: "running", color: first, value: (point) => point.num_running },
        { label: "waiting", color: second, value: (point) => point.num_waiting },
        { label: "cap", color: limit, dash: [8, 5], value: (_, watch) => watch.max_num_seqs },
      ],
    },
    {
      title: "Memory of sequences",
      unit: "share in use",
      format: percent,
      top: 1,
      lines: [
        { label: "key-value pages", color: first, value: (point, watch) => share(point.kv_pages_used, watch.kv_pages) },
        {
          label: "state slots",
          color: second,
          value: (point, watch) => share(point.state_slots_used, watch.state_slots),
        },
        { label: "prompts from the cache", color: limit, dash: [2, 3], value: (point) => point.cached_share },
      ],
    },
    latency("First token", "from the request's arrival", (point) => point.first_token),
    latency("Between tokens", "a round's share for each token", (point) => point.inter_token),
  ];
}

const share = (part, whole) => (whole ? part / whole : null);

// -- capacity --------------------------------------------------------------------------------------------------------

function table(capacity) {
  const { max_num_seqs: most, binding_limit: binding, rows_per_round: rows, kv_cache: kv } = capacity;
  byId("capacity-words").textContent =
    `${most} sequences may run at once, ${rows} rows a round; the cap is set by ${binding}. ` +
    `The key-value cache holds ${kv.tokens.toLocaleString("en")} tokens, ` +
    `a sequence ${capacity.max_model_len.toLocaleString("en")}. On ${capacity.device}, ${capacity.dtype}.`;
  const rowsOf = (id, entries) => byId(id).tBodies[0].replaceChildren(...entries);
  const row = (name, value, binds) =>
    make(
      "tr",
      binds ? { "data-binds": "" } : {},
      make("th", { scope: "row", text: name }),
      make("td", { text: value }),
    );
  rowsOf(
    "limits",
    Object.entries(capacity.limits).map(([name, count]) => row(name, count.toLocaleString("en"), name === binding)),
  );
  // the file's size is no part of it
  const parts = Object.entries(capacity.memory).filter(([name, bytes]) => bytes > 0 && name !== "checkpoint_bytes");
  const named = (name) => name.replace(/_bytes$/, "").replaceAll("_", " ");
  const mebibytes = (bytes) => (bytes / 2 ** 20).toLocaleString("en", { maximumFractionDigits: 1 });
  rowsOf(
    "memory",
    parts.map(([name, bytes]) => row(named(name), mebibytes(bytes))),
  );
}
