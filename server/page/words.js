// How the server is, in sentences: [level, text] with level good, note, warn or bad.

import { percent } from "./dom.js";

export function sentences(health, watch, capacity) {
  return [
    ...engine(health),
    ...(health.speculation ? speculation(health.speculation) : []),
    ...checks(health),
    ...health.slow.map((text) => ["warn", text]),
    ...(capacity ? paying(watch, health) : []),
    ...(capacity ? room(watch, capacity) : []),
  ];
}

function engine({ status, engine, version }) {
  const part = engine.part ? ` (${engine.part})` : "",
    message = engine.message ? `: ${engine.message}` : "";
  return (
    {
      ok: [["good", `The engine serves. pilotfish ${version}.`]],
      loading: [["note", "The model is loading."]],
      draining: [["warn", "The server is ending: running requests may end, new ones are refused."]],
      stalled: [["bad", `The engine has not answered for ${Math.round(engine.seconds_silent)} s.`]],
    }[status] ?? [["bad", `The engine has failed${part}${message}.`]]
  );
}

function speculation(told) {
  if (told.enabled) {
    const count = told.num_speculative_tokens,
      drafted = `${count} drafted token${count === 1 ? "" : "s"} a round`;
    return [["good", `Speculation is on: ${drafted}, by ${told.draft_head ?? "the head"}.`]];
  }
  return [["warn", `Speculation is off: ${told.disabled_reason ?? "it was not asked for"}.`]];
}

function checks({ speculation, trunk_check: trunk }) {
  const told = [];
  const head = speculation?.head_check;
  if (head?.verdict === "ok") {
    const [first, most] = [head.head_top1[0], head.trunk_top1].map(percent);
    told.push(["good", `Of a known text the head ranked ${first} of the next tokens first, the model ${most}.`]);
  } else if (head) {
    const level = { weak: "warn", dead: "bad" }[head.verdict] ?? "note";
    const found = head.verdict === "untested" ? "not tested" : `found ${head.verdict}`;
    told.push([level, `The head was ${found}${head.reason ? `: ${head.reason}` : ""}.`]);
  }
  if (trunk?.verdict === "failed") told.push(["bad", `The model failed its test: ${trunk.reason}.`]);
  return told;
}

/** The newest value that was measured, within the last minute. */
export function latest(watch, value) {
  const from = watch.time - 60;
  return watch.points.findLast((point) => point.time >= from && value(point) !== null);
}

function paying(watch, { speculation }) {
  if (!speculation?.enabled) return [];
  const point = latest(watch, (one) => one.acceptance_length);
  if (!point) return [["note", "No round in the last minute."]];
  const length = `A round commits ${point.acceptance_length.toFixed(2)} tokens to a sequence that drafts`;
  if (point.speedup === null) return [["note", `${length}. Whether that pays was not timed at the start.`]];
  const times = `${length}: in all ${point.speedup.toFixed(2)} × as fast as k = 0, by rounds timed at the start.`;
  if (point.speedup >= 1) return [["good", times]];
  if (point.acceptance_length < point.break_even) return [["warn", `${times} A smaller k, or 0, would be faster.`]];
  return [["note", `${times} Sequences without drafts share those rounds and gain nothing.`]];
}

function room(watch, { binding_limit: limit, max_num_seqs: most }) {
  const now = watch.points.at(-1),
    told = [];
  if (now?.num_waiting) told.push(["note", `${now.num_waiting} wait: ${most} may run at once, by ${limit}.`]);
  if (now && watch.kv_pages && now.kv_pages_used > 0.9 * watch.kv_pages) {
    told.push(["warn", `The key-value cache is ${percent(now.kv_pages_used / watch.kv_pages)} full.`]);
  }
  return told;
}
