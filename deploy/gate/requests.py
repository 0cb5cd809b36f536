"""Gates on requests: text in and out, chat, tools, JSON, and the same tokens with and without speculation."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pilotfish.deploy.gate.gate import CannotRun, Found, Subject
from pilotfish.deploy.prompts import domains

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXTS = (
    "def f(x):\n\treturn  {'a': x}  # two blanks\n\n",
    "从前有一座山，山里有一座庙。",
    "naïve café — “quotes”, 1 234,5 € and 👩‍🚀🇸🇪",
    " leading and trailing ",
)
MESSAGES = [
    {"role": "system", "content": "Answer in one short sentence."},
    {"role": "user", "content": "What is a harbour?"},
    {"role": "assistant", "content": "A place where ships lie safely."},
    {"role": "user", "content": "And what is a quay?"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "count"],
    "additionalProperties": False,
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
}
PROBE = {"prompt": "one two three one two three one two", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
"""A request that any head drafts for, the look-up too."""
PROMPT_CHARS = 120
EXACT_TOKENS = 32
BAD_CHARS = 8
BAD_BYTES = 31
"""Of a forbidden word, at most: with a space before it, it has no more tokens than the 32 that a request may forbid."""


def ask(subject: Subject) -> None:
    """One request, where no gate before has made one: traces of requests are what some gates look at."""
    if not subject.server.requests:
        subject.server.post(COMPLETIONS, PROBE)


def k_served(subject: Subject) -> Found:
    """The drafts that a request was really offered, by position, against what was asked for."""
    before = subject.server.metrics()
    subject.server.post(COMPLETIONS, PROBE)
    after = subject.server.metrics()
    name = "spec_decode_num_draft_tokens_per_pos_total"
    positions = {int(p): n - before.total(name, position=p) for p, n in after.by(name, "position").items()}
    offered = max((position + 1 for position, count in positions.items() if count > 0), default=0)
    reason = subject.speculation["disabled_reason"]
    came = f"k = {subject.k}" + (f" ({reason})" if reason else f", drafts offered up to position {offered}")
    wanted = subject.expected.k
    if wanted is None:
        return Found((subject.k > 0 or subject.k_was_chosen) and offered == subject.k, "speculation", came)
    return Found(subject.k == wanted == offered, f"k = {wanted}", came)


def tokenizer(subject: Subject) -> Found:
    wanted = f"{len(TEXTS)} texts come back as they were"
    for text in TEXTS:
        ids = subject.server.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        back = subject.server.post("/detokenize", {"tokens": ids})["prompt"]
        if back != text:
            return Found(False, wanted, f"{text!r} came back as {back!r}")
    return Found(True, wanted, f"{len(TEXTS)} texts")


def template(subject: Subject) -> Found:
    """A conversation through the chat template and back: all of it, in order, and then the model's turn."""
    server = subject.server
    wanted = "every message once and in order, then the answer's opening; a chat reads the same prompt"
    plain = _rendered(subject, add_generation_prompt=False)
    opened = _rendered(subject, add_generation_prompt=True)
    at = 0
    for message in MESSAGES:
        if plain.count(message["content"]) != 1:
            return Found(False, wanted, f"{message['content']!r} stands there {plain.count(message['content'])} times")
        if message["role"] not in plain[at : (at := plain.index(message["content"]))]:
            return Found(False, wanted, f"no {message['role']!r} before {message['content']!r}, or out of order")
    if not opened.startswith(plain) or opened == plain:
        return Found(False, wanted, f"the answer's opening is {opened[len(plain) :]!r} after {opened[:40]!r}..")
    num_tokens = server.post("/tokenize", {"messages": MESSAGES})["count"]
    counted = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 1})["usage"]["prompt_tokens"]
    came = f"{len(MESSAGES)} messages; {num_tokens} tokens by /tokenize, {counted} in a chat"
    return Found(num_tokens == counted, wanted, came)


def _rendered(subject: Subject, **fields: Any) -> str:
    ids = subject.server.post("/tokenize", {"messages": MESSAGES, **fields})["tokens"]
    return subject.server.post("/detokenize", {"tokens": ids})["prompt"]


def streamed_chat(subject: Subject) -> Found:
    """A chat as a stream: events to the end, and the same text as without."""
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    events = list(subject.server.stream(CHAT, body))
    deltas = [choice["delta"] for event in events if event for choice in event.get("choices", ())]
    reasons = [c["finish_reason"] for e in events if e for c in e.get("choices", ()) if c.get("finish_reason")]
    text = "".join(delta.get("content") or "" for delta in deltas)
    whole = subject.server.post(CHAT, body)["choices"][0]
    has_usage = any(event and event.get("usage") for event in events)
    passed = (
        events[-1] is None
        and bool(deltas)
        and deltas[0].get("role") == "assistant"
        and reasons == [whole["finish_reason"]]
        and has_usage
        and text == (whole["message"]["content"] or "")
    )
    done = "ends with [DONE]" if events[-1] is None else "no [DONE]"
    came = f"{len(deltas)} events, {done}, finish {reasons}, {len(text)} characters"
    if text != (whole["message"]["content"] or ""):
        came += f", not the text without a stream ({len(whole['message']['content'] or '')} characters)"
    return Found(passed, "role, text, finish_reason, usage, [DONE]; the text of the same chat without a stream", came)


def tool_call(subject: Subject) -> Found:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    body = {"messages": messages, "tools": [TOOL], "tool_choice": "required", "temperature": 0, "max_tokens": 256}
    choice = subject.server.post(CHAT, body)["choices"][0]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    came = f"finish_reason {choice['finish_reason']}, " + (
        ", ".join(f"{call['name']}({call['arguments']})" for call in calls) or "no call"
    )
    passed = choice["finish_reason"] == "tool_calls" and bool(calls) and all(map(_is_call, calls))
    return Found(passed, 'a call of get_weather with a "city", tool_choice required', came)


def _is_call(call: dict[str, Any]) -> bool:
    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        return False
    return call["name"] == "get_weather" and isinstance(arguments, dict) and isinstance(arguments.get("city"), str)


def json_schema(subject: Subject) -> Found:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    messages = [{"role": "user", "content": "Name a city and a number."}]
    body = {"messages": messages, "response_format": form, "temperature": 0, "max_tokens": 128}
    choice = subject.server.post(CHAT, body)["choices"][0]
    text = choice["message"]["content"] or ""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    passed = (
        isinstance(value, dict)
        and value.keys() == {"city", "count"}
        and value["city"] in ("Rome", "Oslo")
        and type(value["count"]) is int
        and 0 <= value["count"] <= 9
        and choice["finish_reason"] == "stop"
    )
    came = f"finish_reason {choice['finish_reason']}, {text[:80]!r}"
    return Found(passed, "JSON of the schema (city of two, count 0 to 9), finish_reason stop", came)


def exactness(subject: Subject) -> Found:
    """Each request alone at k = 0, then all at once at the served k: the same token ids.

    Some forbid words of what came without: bans that fire, in the middle of runs of accepted drafts.
    """
    prompts = [prompt.completion[:PROMPT_CHARS] for prompt in domains().values()]
    plain = [(text, mode, ()) for text in prompts for mode in MODES]
    free = [_tokens(subject, *request, k=0) for request in plain]
    banning = [
        (text, mode, words)
        for (text, mode, _), answer in zip(plain, free, strict=True)
        if (words := bad_words(answer.text))
    ]
    requests = [*plain, *banning]
    alone = [answer.ids for answer in free] + [_tokens(subject, *request, k=0).ids for request in banning]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda one: _tokens(subject, *one), requests))
    wanted = (
        f"the same ids of {len(requests)} requests, greedy and sampled, {len(banning)} with bad_words, "
        f"at k = 0 alone and k = {subject.k} together"
    )
    for (text, mode, words), first, second in zip(requests, alone, together, strict=True):
        if first != second.ids:
            at = next((i for i, (a, b) in enumerate(zip(first, second.ids, strict=False)) if a != b), "the end")
            banned = f" without {', '.join(map(repr, words))}" if words else ""
            return Found(False, wanted, f"{mode}{banned} after {text[:30]!r}: differs at token {at}")
    drafted = sum(answer.num_drafted for answer in together)
    without = {(text, mode): answer.ids for (text, mode, _), answer in zip(plain, free, strict=True)}
    fired = sum(without[text, mode] != ids for (text, mode, _), ids in zip(banning, alone[len(plain) :], strict=True))
    came = f"the same {sum(map(len, alone))} ids, {drafted} tokens drafted, bad_words changed {fired} texts"
    return Found(bool(drafted) == bool(subject.k), wanted, came)


def bad_words(text: str) -> tuple[str, ...]:
    """Two neighbouring words of a text and a piece of its middle, sequences of several tokens that it holds, as far as
    a request may forbid them: where nothing stands between words, one is a whole text."""
    words = text.split()
    pair = words[len(words) // 3 :][:2]
    middle = text[len(text) // 2 :][:BAD_CHARS].strip()
    pieces = (word.encode()[:BAD_BYTES].decode(errors="ignore").strip() for word in (" ".join(pair), middle))
    return tuple(dict.fromkeys(piece for piece in pieces if piece))


@dataclass(frozen=True)
class Answer:
    """`num_drafted`: tokens drafted for it."""

    ids: list[int]
    text: str
    num_drafted: int


def _tokens(subject: Subject, text: str, mode: str, banned: tuple[str, ...], k: int | None = None) -> Answer:
    body = {
        "prompt": text,
        "max_tokens": EXACT_TOKENS,
        "return_token_ids": True,
        "include_metrics": True,
        **MODES[mode],
        **({"bad_words": list(banned)} if banned else {}),
    }
    answer = subject.server.post(COMPLETIONS, body | ({} if k is None else {"speculation": {"k": k}}))
    choice = answer["choices"][0]
    if choice.get("token_ids") is None:
        raise CannotRun("the server returns no token_ids")
    return Answer(choice["token_ids"], choice["text"], answer["metrics"]["speculative_decoding"]["drafted"])
