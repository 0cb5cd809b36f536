// Elements and numbers. Text is only ever put in as text: the server's policy lets nothing else in.

export const byId = (id) => document.getElementById(id);

export function make(name, { text, className, ...attributes } = {}, ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  element.append(...children);
  return element;
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The colour at a share of the way from one to another, both as #rrggbb. */
export function between(from, to, share) {
  const [a, b] = [from, to].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return (
    "#" +
    a
      .map((value, i) =>
        Math.round(value + (b[i] - value) * share)
          .toString(16)
          .padStart(2, "0"),
      )
      .join("")
  );
}

/** Which of the eight steps of the scale draft i of k has: few drafts are far apart. */
export const step = (draft, k) => (k <= 1 ? 5 : 1 + Math.round(((Math.min(draft, k) - 1) / (k - 1)) * 7));

export function seconds(value) {
  if (value === 0) return "0";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  return value < 1 ? `${(value * 1000).toFixed(0)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export const percent = (share) => (share > 0 && share < 0.0005 ? "<0.1 %" : `${Number((share * 100).toFixed(1))} %`);

const NAMES = { "\n": "↵", "\r": "␍", "\t": "→", " ": "␣" };

/** A token's text where nothing of it may hide: white space by signs, what has no shape by its number. */
export function visible(text) {
  const named = text.replace(/^ +| +$|[\n\r\t]/g, (found) => [...found].map((one) => NAMES[one]).join(""));
  return named.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (one) => `\\u{${one.codePointAt(0).toString(16)}}`);
}

let announced = 0;

/** Says it to who listens; never each token. */
export function announce(text) {
  // the same words twice are news twice
  byId("announce").textContent = text + (announced++ % 2 ? "\u00a0" : "");
}
