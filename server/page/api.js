// Requests to the server that served this page. Addresses are relative to the document, so that any prefix works; the
// key is a variable of this module and is kept nowhere else.

let key = "";
const open = new Set();

/** An answer that is no answer: `status` 0 where the server did not speak. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function useKey(given) {
  key = given;
}

export const hasKey = () => key !== "";

/** JSON of a GET, of a 503 too where `any` is set: /health answers with one. */
export async function get(path, { any = false } = {}) {
  const response = await send(path, {});
  if (!response.ok && !any) throw await refusal(response);
  return response.json();
}

/** Events of a stream, as JSON, until it ends. A failure inside of the stream is thrown as one before it is. */
export async function* stream(path, body, abort) {
  open.add(abort);
  try {
    const headers = { "Content-Type": "application/json" };
    const response = await send(path, { method: "POST", headers, body: JSON.stringify(body), signal: abort.signal });
    if (!response.ok) throw await refusal(response);
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(500, event.error.message);
      yield event;
    }
    throw new Refusal(0, "The stream broke off.");
  } finally {
    open.delete(abort);
  }
}

async function send(path, options) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  try {
    return await fetch(path, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "The server cannot be reached.");
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  return new Refusal(response.status, body?.error?.message ?? `The server answered ${response.status}.`);
}

/** The data of server-sent events; comments, which keep relays awake, have none. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let begin = 0;
    for (let end; (end = text.indexOf("\n\n", begin)) >= 0; begin = end + 2) {
      if (text.startsWith("data: ", begin)) yield text.slice(begin + 6, end);
    }
    text = text.slice(begin);
  }
}

// a page that is kept for the back button keeps no stream
addEventListener("pagehide", () => open.forEach((abort) => abort.abort()));
