// What is known of one token: under the pointer, tapped, or reached with the arrow keys.

import { announce, byId, make, percent, visible } from "./dom.js";

let at = null;

export function inspect(pane) {
  const { text } = pane;
  const indexOf = (event) => event.target.closest?.("[data-at]")?.dataset.at;
  const point = (event) => indexOf(event) !== undefined && show(pane, Number(indexOf(event)));
  text.addEventListener("pointerover", point);
  text.addEventListener("click", point);
  text.addEventListener("keydown", (event) => {
    const far = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!far || !pane.tokens.length || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const last = Math.min(pane.tokens.length, pane.shown ?? 0) - 1;
    const next = at?.pane === pane ? Math.max(0, Math.min(last, at.index + far)) : 0;
    show(pane, next);
    text.querySelector(`[data-at="${next}"]`)?.scrollIntoView({ block: "nearest" });
    announce(words(pane.tokens[next], next).join(", "));
  });
}

function show(pane, index) {
  const token = pane.tokens[index];
  if (!token) return;
  at = { pane, index };
  mark(pane, token, index);
  const [quoted, ...rest] = words(token, index);
  const described = make("p", {}, make("b", { className: "quoted", text: quoted }), make("br"), rest.join(" · "));
  byId("inspector").className = "shows";
  byId("inspector").replaceChildren(described, ...alternatives(token));
}

/** The token and those of its round. */
function mark(pane, token, index) {
  document.querySelectorAll(".t.at, .t.same").forEach((element) => element.classList.remove("at", "same"));
  const span = (i) => pane.text.querySelector(`[data-at="${i}"]`);
  for (const way of [-1, 1]) {
    for (let i = index + way; pane.tokens[i]?.round === token.round; i += way) span(i)?.classList.add("same");
  }
  span(index)?.classList.add("at");
}

function words(token, index) {
  const whose = {
    trunk: "the model's own",
    draft: `draft ${token.draft}, accepted`,
    grammar: token.draft ? `forced by the grammar, as draft ${token.draft}` : "forced by the grammar",
  };
  const round = token.round ? `round ${token.round}` : "from the prompt";
  const chance =
    token.logprob === undefined ? [] : [`${percent(Math.exp(token.logprob))} (log ${token.logprob.toFixed(3)})`];
  return [
    visible(token.text) || "no text",
    `token ${index + 1}`,
    `id ${token.id}`,
    round,
    whose[token.origin],
    ...chance,
  ];
}

function alternatives(token) {
  if (!token.top?.length) return [];
  const rows = token.top.map(([text, logprob]) => {
    const fill = make("i"),
      share = Math.exp(logprob);
    fill.style.width = `${share * 100}%`;
    return make(
      "li",
      { className: text === token.name ? "chosen" : "" },
      make("span", { className: "name", text: visible(text) }),
      make("span", { className: "bar" }, fill),
      make("span", { className: "share", text: percent(share) }),
    );
  });
  return [make("ol", { "aria-label": "Likeliest tokens here" }, ...rows)];
}
