"""Requests whose rules fire inside runs: stop ids, bans, budgets and the like, made from the text that came without.

A rule that never fires proves nothing, so each is derived from what the checkpoint itself writes at k = 0: the token
that it writes at a chosen place becomes a stop id, the end of a bad sequence, what opens a thinking block, and so on.
What the rule then gives alone at k = 0 is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pilotfish.engine.link.messages import Grammar, SamplingParams, Submit, ThinkingBudget

RULE_TOKENS = 12
"""Tokens of the longest request with a rule; most are shorter."""
NUM_ALLOWED = 12
LIFTED = 100.0
"""A bias with which an id comes wherever it may."""
MIN_TOKENS = 5
"""The min_tokens of requests whose end would come at once."""
LITERAL = "the old harbour of the town"
"""What a grammar forces: several tokens with any tokenizer."""
GRAMMARS = {
    # which letters may follow depends on the digit before: a draft changes the next row's mask
    "regex": Grammar(kind="regex", source="([0-4][a-m]|[5-9][n-z]){8,40}"),
    "forced-run": Grammar(kind="regex", source=f"[0-9]{LITERAL}[0-9]{{2,30}}"),
    # whole before min_tokens: then nothing but an end may come
    "grammar-end": Grammar(kind="regex", source="[0-9][a-z][0-9][a-z][0-9]", min_tokens=9),
    "json-schema": Grammar(
        kind="json_schema",
        source='{"type":"object","properties":{"a":{"enum":["x","y"]},"b":{"type":"array","items":{"type":"integer"}}},'
        '"required":["a","b"],"additionalProperties":false}',
    ),
}
TWO_LETTERS = Grammar(kind="regex", source="[ab]{9,40}", min_tokens=MIN_TOKENS)
DRAWN: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.9, "top_k": 60, "top_p": 0.97})

Decode = Callable[[Submit], list[int]]


@dataclass
class Rules:
    """`requests` with rules by name; `silent`: rules that this checkpoint's text could not be made to fire."""

    requests: list[Submit] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Base:
    """A prompt, how it is decoded, and what comes of it without a rule; the seed is the prompt's."""

    prompt: list[int]
    sampling: SamplingParams
    text: list[int]

    def with_rule(self, name: str, num_tokens: int | None = None, **fields: object) -> Submit:
        """A request for this text under a rule."""
        sampling = msgspec.structs.replace(
            self.sampling, max_tokens=min(num_tokens or RULE_TOKENS, len(self.text)), **fields
        )
        return Submit(request_id=name, prompt_token_ids=self.prompt, sampling=sampling)

    def new_from(self, place: int) -> int | None:
        """The first place from `place` on whose token has not stood in the text before."""
        return next((i for i in range(place, len(self.text)) if self.text[i] not in self.text[:i]), None)


def derive(
    prompts: list[list[int]], long_prompt: list[int] | None, num_tokens: int, eos: tuple[int, ...], vocab: int,
    grammars: bool, decode: Decode,
) -> Rules:  # fmt: skip
    """Requests of at most RULE_TOKENS; `decode` gives what a request writes alone at k = 0. `long_prompt` ends just
    before a page does; None where the model takes none as long."""
    num_tokens = min(num_tokens, RULE_TOKENS)
    bases = []
    for number in range(4):
        sampling = SamplingParams(
            **DRAWN[number % 2], max_tokens=num_tokens, seed=2000 + number, eos_token_ids=eos, ignore_eos=True
        )
        prompt = prompts[number % len(prompts)]
        text = decode(Submit(request_id="free", prompt_token_ids=prompt, sampling=sampling))
        bases.append(Base(prompt, sampling, text))
    rules = Rules()
    if long_prompt is None:
        rules.silent.append("pages")
    else:
        sampling = msgspec.structs.replace(bases[0].sampling, max_tokens=num_tokens)
        rules.requests.append(Submit(request_id="pages", prompt_token_ids=long_prompt, sampling=sampling))
    for name, request in _requests(bases, eos or (vocab - 1,), vocab, grammars, decode):
        if request is None:
            rules.silent.append(name)
            continue
        rules.requests.append(request)
        if name not in NOT_JUDGED and decode(request) == decode(_without(request)):
            rules.silent.append(name)
    return rules


def _without(request: Submit) -> Submit:
    """The request without its rule; of penalties, without them alone."""
    sampling = request.sampling
    penalties: dict[str, Any] = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    rules: dict[str, Any] = {
        "stop_token_ids": (), "min_tokens": 0, "bad_words_token_ids": (), "logit_bias": {}, "allowed_token_ids": None,
        "thinking": None, "grammar": None,
    }  # fmt: skip
    changed = penalties if sampling.presence_penalty else rules
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(sampling, **changed))


NOT_JUDGED = ("choice-1", "choice-2", "short-1", "short-2", "own-k", "thinking-closed")
"""Other noise, limits and depths, and a rule that must not fire: the text without them says nothing."""


def _requests(
    bases: list[Base], eos: tuple[int, ...], vocab: int, grammars: bool, decode: Decode
) -> Iterator[tuple[str, Submit | None]]:
    greedy, sampled, greedy_2, sampled_2 = bases
    yield from (_stop("stop-1", greedy, 3), _stop("stop-2", sampled, 6), _stop("stop-3", sampled_2, 1))
    yield _min_tokens("min-tokens-1", sampled, decode)
    # id 0 would come at once, and must not be taken for what fills up a list
    first: dict[str, Any] = {"logit_bias": {0: LIFTED}, "stop_token_ids": (0,), "min_tokens": MIN_TOKENS}
    yield "min-tokens-2", greedy_2.with_rule("min-tokens-2", **first)
    yield from (_bad_words("bad-words-1", greedy, decode), _bad_words("bad-words-2", sampled_2, decode))
    yield from _thinking(greedy_2, greedy, vocab)
    yield "bias", sampled.with_rule("bias", logit_bias=_bias(sampled.text), bad_words_token_ids=((sampled.text[1],),))
    yield "allowed", greedy.with_rule("allowed", allowed_token_ids=_allowed(greedy.text, vocab))
    strong: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": 1.5, "repetition_penalty": 1.5}
    yield "penalties", greedy_2.with_rule("penalties", logit_bias=_lifted(greedy_2.text), **strong)
    yield "choice-1", sampled.with_rule("choice-1", 8, choice=1)
    # limits that end a request in a window, beside ones that go on; a filter that leaves one token
    yield "short-1", greedy.with_rule("short-1", 5, temperature=0.9, min_p=1.0)
    yield "short-2", sampled_2.with_rule("short-2", 2)
    if grammars:
        yield from _grammars(bases, eos, vocab, decode)
    # the last to end: rounds of these two alone are narrower than the drafts that a slot holds
    own_k = (
        greedy_2.with_rule("own-k", 9, temperature=0.9, top_p=0.002),
        sampled_2.with_rule("choice-2", 9, choice=2),
    )
    yield from ((request.request_id, msgspec.structs.replace(request, speculative_k=1)) for request in own_k)


def _grammars(
    bases: list[Base], eos: tuple[int, ...], vocab: int, decode: Decode
) -> Iterator[tuple[str, Submit | None]]:
    greedy, sampled = bases[:2]
    for number, (name, grammar) in enumerate(GRAMMARS.items()):
        grammar = msgspec.structs.replace(grammar, ends=eos)
        yield name, bases[number % 4].with_rule(name, grammar=grammar, eos_token_ids=eos)
    # a letter that ends the text would come at once
    fields: dict[str, Any] = {"eos_token_ids": eos, "grammar": TWO_LETTERS}
    letter = decode(greedy.with_rule("free", **fields))[0]
    fields["grammar"] = msgspec.structs.replace(TWO_LETTERS, ends=(*eos, letter))
    lifted: dict[str, Any] = {"stop_token_ids": (letter,), "logit_bias": {letter: LIFTED}}
    yield "grammar-least", greedy.with_rule("grammar-least", **fields, **lifted)
    # ids that are the first of a mask's word come while the grammar waits
    waiting = dict.fromkeys(range(128, min(256, vocab), 32), LIFTED)
    text = decode(sampled.with_rule("free", logit_bias=waiting))
    after = next((token for token in text[1:] if token != text[0]), None)
    if after is None:
        yield "grammar-after", None
        return
    grammar = msgspec.structs.replace(GRAMMARS["regex"], after_token_id=after)
    yield "grammar-after", sampled.with_rule("grammar-after", grammar=grammar, logit_bias=waiting, eos_token_ids=eos)


def _stop(name: str, base: Base, place: int) -> tuple[str, Submit | None]:
    at = base.new_from(place)
    return name, None if at is None else base.with_rule(name, stop_token_ids=(base.text[at],))


def _min_tokens(name: str, base: Base, decode: Decode) -> tuple[str, Submit | None]:
    """A stop id that is banned early on, and another that ends the text as soon as it may, or soon after."""
    early = base.text[1]
    most = len(base.text)
    banned = base.with_rule(name, stop_token_ids=(early,), min_tokens=most)
    text = decode(banned)
    at = next((i for i in range(4, most) if text[i] not in text[:i]), None)
    if at is None:
        return name, None
    return name, base.with_rule(name, stop_token_ids=(early, text[at]), min_tokens=at)


def _bad_words(name: str, base: Base, decode: Decode) -> tuple[str, Submit | None]:
    """Sequences of two and three tokens, each found in the text that came with those before."""
    bad: list[tuple[int, ...]] = []
    text = base.text
    for place, length in ((2, 2), (4, 3), (7, 2), (9, 2)):
        if place < len(text):
            bad.append(tuple(text[place - length + 1 : place + 1]))
            text = decode(base.with_rule(name, bad_words_token_ids=tuple(bad)))
    return name, base.with_rule(name, bad_words_token_ids=tuple(bad)) if bad else None


def _thinking(base: Base, other: Base, vocab: int) -> Iterator[tuple[str, Submit | None]]:
    free = [token for token in range(vocab) if token not in base.text and token not in other.text]
    end, closing = free[1], tuple(free[:3])
    opened = ThinkingBudget(num_tokens=3, start_token_id=base.text[1], end_token_id=end, closing=closing)
    yield "thinking-opened", base.with_rule("thinking-opened", 10, thinking=opened)
    # its end would come at once, but is banned after what the text says: a row after a wrong draft chooses it
    inside = ThinkingBudget(num_tokens=4, start_token_id=None, end_token_id=end, closing=(free[0], end))
    bad = tuple((token, end) for token in dict.fromkeys(other.text[:4]))
    lifted: dict[str, Any] = {"logit_bias": {end: LIFTED}, "stop_token_ids": (end,), "min_tokens": 1}
    yield "thinking-prompt", other.with_rule("thinking-prompt", thinking=inside, bad_words_token_ids=bad, **lifted)
    # closed by itself one token before the budget's end; but for that, other tokens would follow
    at = base.new_from(3)
    if at is not None:
        closed = ThinkingBudget(
            num_tokens=at + 1, start_token_id=None, end_token_id=base.text[at], closing=(free[0], base.text[at])
        )
        yield "thinking-closed", base.with_rule("thinking-closed", thinking=closed)


def _bias(text: list[int]) -> dict[int, float]:
    return {text[2]: -100.0, **dict.fromkeys(text[4:8], -1.5)}


def _lifted(text: list[int]) -> dict[int, float]:
    """A few tokens made likely enough to come again and again, so that penalties decide which."""
    return dict.fromkeys(sorted(set(text))[:4], 3.0)


def _allowed(text: list[int], vocab: int) -> tuple[int, ...]:
    """Some ids of the text, not all, and some others."""
    kept = [token for token in dict.fromkeys(text) if token != text[2]][: NUM_ALLOWED // 2]
    return tuple(sorted({*kept, *range(5, vocab, max(1, vocab // (NUM_ALLOWED // 2)))}))


def lures(params: SamplingParams) -> list[int]:
    """Ids that mean something to a request's rules: wrong drafts that must leave no trace."""
    thinking = params.thinking
    found = [*params.stop_token_ids, *(token for word in params.bad_words_token_ids for token in word)]
    if thinking is not None:
        found += [thinking.end_token_id, *thinking.closing]
        found += [] if thinking.start_token_id is None else [thinking.start_token_id]
    if params.grammar is not None and params.grammar.after_token_id is not None:
        found.append(params.grammar.after_token_id)
    return list(dict.fromkeys(found))
