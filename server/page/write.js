// Write: one request, or the same at k = 0 and at k at once.

import { get, Refusal, stream } from "./api.js";
import { announce, byId, make } from "./dom.js";
import { inspect } from "./inspector.js";
import { Pane } from "./pane.js";
import { Race } from "./race.js";

const NUMBERS = [
  "max_tokens",
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "presence_penalty",
  "frequency_penalty",
  "repetition_penalty",
  "seed",
];
const NUM_ALTERNATIVES = 5;
const form = byId("ask"),
  field = (name) => form.elements[name];
let served = null,
  running = [],
  onRefused = () => {};
/** The chat so far; the newest answer is in the panes and not among those that are shown above. */
let turns = [];

export function startWriting({ onUnauthorized }) {
  onRefused = onUnauthorized;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    write();
  });
  form.addEventListener("change", tidy);
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", startAnew);
  // a field that is wrong must be seen
  form.addEventListener("invalid", (event) => event.target.closest("details")?.setAttribute("open", ""), true);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.form === form) form.requestSubmit();
  });
  tidy();
}

/** The depth that the server speculates with. */
export function serve(k) {
  if (k === served) return;
  served = k;
  field("k").max = field("k").value = k;
  field("beside").disabled = k === 0;
  legend(k);
}

function legend(k) {
  const entry = (name, text) => make("li", {}, make("i", { className: name }), text);
  const drafts = Array.from({ length: k }, (_, i) => {
    const depth = k <= 1 ? 5 : 1 + Math.round((i / (k - 1)) * 7);
    return entry(`d${depth}`, `draft ${i + 1}`);
  });
  byId("legend").replaceChildren(entry("", "the model's own"), ...drafts, entry("grammar", "forced by a grammar"));
}

function tidy() {
  const chat = field("api").value === "chat",
    pattern = field("pattern").closest("label");
  pattern.hidden = !["json", "regex"].includes(field("grammar").value);
  for (const name of ["thinking", "system"]) field(name).closest("label").hidden = !chat;
  byId("turns").hidden = byId("new-chat").hidden = !chat || !byId("turns").children.length;
}

function stop() {
  running.forEach((abort) => abort.abort());
}

// -- the request -----------------------------------------------------------------------------------------------------

function body() {
  const chat = field("api").value === "chat";
  const asked = { stream: true, return_token_ids: true };
  for (const name of NUMBERS) if (field(name).value !== "") asked[name] = Number(field(name).value);
  // both panes draw the same noise
  asked.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  const { value: kind } = field("grammar"),
    pattern = field("pattern").value;
  if (kind === "json_object") asked.structured_outputs = { json_object: true };
  if (kind === "json") asked.structured_outputs = { json: parsed(pattern) };
  if (kind === "regex") asked.structured_outputs = { regex: pattern };
  if (!chat) {
    const logprobs = field("logprobs").checked ? { logprobs: NUM_ALTERNATIVES } : {};
    return ["v1/completions", { ...asked, ...logprobs, prompt: field("prompt").value }];
  }
  if (field("logprobs").checked) Object.assign(asked, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  if (field("thinking").value) asked.enable_thinking = field("thinking").value === "on";
  const system = field("system").value ? [{ role: "system", content: field("system").value }] : [];
  asked.messages = [...system, ...turns, { role: "user", content: field("prompt").value }];
  return ["v1/chat/completions", asked];
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Refusal(400, "The schema is no JSON.");
  }
}

async function write() {
  if (running.length) return;
  byId("ask-error").textContent = "";
  let path, asked;
  try {
    if (served === null) serve((await get("health", { any: true })).speculation?.num_speculative_tokens ?? 0);
    [path, asked] = body();
  } catch (error) {
    byId("ask-error").textContent = error.message;
    return;
  }
  const k = field("k").value === "" ? served : Number(field("k").value);
  const depths = field("beside").checked && k > 0 ? [0, k] : [k];
  const panes = depths.map((depth) => new Pane(depth, served || 1));
  panes.forEach(inspect);
  byId("panes").replaceChildren(...panes.map((pane) => pane.element));
  busy(true);
  announce(panes.length > 1 ? `Writing at k = 0 and k = ${k}.` : "Writing.");
  const typed = field("prompt").value,
    chat = turns;
  // the last answer leaves the panes
  showTurns(asked.messages ?? turns);
  if (asked.messages) field("prompt").value = "";
  const race = new Race(panes);
  running = panes.map(() => new AbortController());
  await Promise.all(panes.map((pane, i) => run(pane, path, asked, running[i], race)));
  running = [];
  busy(false);
  race.finish();
  // a completion is no turn, and a new chat may have been begun meanwhile
  if (!asked.messages || turns !== chat) return;
  if (panes.every((pane) => !pane.error.textContent)) {
    turns.push(asked.messages.at(-1), { role: "assistant", content: panes.at(-1).content });
  } else {
    field("prompt").value ||= typed;
    showTurns(turns);
  }
}

function busy(is) {
  byId("go").disabled = is;
  byId("stop").disabled = !is;
}

function showTurns(messages) {
  const shown = messages.filter(({ role }) => role !== "system");
  byId("turns").replaceChildren(
    ...shown.map(({ role, content }) => make("li", { text: content, "data-role": role, dir: "auto" })),
  );
  byId("turns").scrollTop = byId("turns").scrollHeight;
  tidy();
}

/** A new chat, at hand with what was asked last. */
function startAnew() {
  stop();
  const asked = [...byId("turns").children].findLast((turn) => turn.dataset.role === "user");
  field("prompt").value ||= asked?.textContent ?? "";
  turns = [];
  showTurns(turns);
  field("prompt").focus();
}

async function run(pane, path, asked, abort, race) {
  try {
    for await (const event of stream(path, { ...asked, speculation: { k: pane.k, trace: true } }, abort)) {
      for (const choice of event.choices) {
        pane.content += choice.delta ? (choice.delta.content ?? "") : choice.text;
        pane.add(tokens(choice));
      }
      race.look();
    }
    pane.end();
  } catch (error) {
    if (error.name === "AbortError") {
      pane.isStopped = true;
      pane.end();
      return;
    }
    if (error.status === 401) onRefused(error.message);
    pane.fail(error.message);
  }
}

/** What a choice's event says of its tokens, put together token by token. */
function tokens(choice) {
  const { trace = [], token_ids: ids = [], logprobs } = choice;
  const isLast = choice.finish_reason !== null;
  return trace.map((token, i) => ({
    ...token,
    id: ids[i],
    isLast: isLast && i === trace.length - 1,
    ...chances(logprobs, i),
  }));
}

function chances(logprobs, i) {
  if (!logprobs) return {};
  if (logprobs.content) {
    const entry = logprobs.content[i];
    return (
      entry && {
        name: entry.token,
        logprob: entry.logprob,
        top: entry.top_logprobs.map((one) => [one.token, one.logprob]),
      }
    );
  }
  const top = Object.entries(logprobs.top_logprobs?.[i] ?? {}).sort((a, b) => b[1] - a[1]);
  return { name: logprobs.tokens[i], logprob: logprobs.token_logprobs[i], top };
}
