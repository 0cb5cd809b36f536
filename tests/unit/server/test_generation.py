"""One sequence's text and counts, over every way in which rounds can cut the same tokens into runs."""

import asyncio
import contextlib
import itertools
import random

import msgspec
import pytest
from byte_model import IM_END
from loaded import ready
from prometheus_client import CollectorRegistry

from pilotfish.engine.link.messages import RequestOutput, SamplingParams, Submit, TokenLogprob
from pilotfish.metrics.collectors import Collector
from pilotfish.server.calls.parser import AnswerRules
from pilotfish.server.calls.parts import Said
from pilotfish.server.completions.request import CompletionRequest
from pilotfish.server.errors import BadRequest, EngineFailed, Overloaded, Unavailable
from pilotfish.server.generation import Choice, Generation
from pilotfish.server.plan import Context, StopRules, plan_completion
from pilotfish.server.text.tokenizer import Tokenizer
from pilotfish.server.waker import Waker

# making series costs more than everything these tests do with them
COLLECTOR = Collector(CollectorRegistry())


def make_choice(tokenizer, stops=(), registry=None, **rules):
    sampling = SamplingParams(max_tokens=100, stop_token_ids=(7,), eos_token_ids=(IM_END,))
    submit = Submit(request_id="r", prompt_token_ids=[1], sampling=sampling)
    collector = Collector(registry) if registry else COLLECTOR
    return Choice(0, submit, tokenizer, StopRules(strings=tuple(stops), keep_tokens=True, **rules), 0.0, collector)


def outputs_of(tokens, runs, finish="length", stop_id=None):
    """Engine outputs: one prefill token, then `runs`; the last output says `finish`."""
    pieces, at = [], 0
    for size in itertools.chain([1], runs):
        pieces.append(tokens[at : at + size])
        at += size
    pieces = [piece for piece in pieces if piece]
    for index, piece in enumerate(pieces):
        last = index == len(pieces) - 1
        yield RequestOutput(
            request_id="r",
            token_ids=piece,
            logprobs=[TokenLogprob(token, -1.0) for token in piece],
            num_drafted=3 if index else 0,
            num_accepted=len(piece) - 1,
            round=index > 0,
            finish_reason=finish if last else None,
            stop_token_id=stop_id if last else None,
        )


def run(choice, outputs, read_every=1):
    """Feeds until the choice ends; reads like a client that is sometimes slow. Returns what the client saw."""
    text, ids = "", []
    for index, output in enumerate(outputs):
        counted = choice.feed(output)
        if index % read_every == 0 and (piece := choice.take()):
            text, ids = text + piece.text, ids + [token.token_id for token in piece.tokens]
        if counted.finish_reason is not None:
            break
    if piece := choice.take():
        text, ids = text + piece.text, ids + [token.token_id for token in piece.tokens]
    return text, ids, choice.finish_reason, choice.stop_reason, choice.num_tokens


def compositions(total, largest=3):
    if total == 0:
        yield ()
    for first in range(1, min(total, largest) + 1):
        for rest in compositions(total - first, largest):
            yield (first, *rest)


@pytest.mark.parametrize(
    ("text", "stops", "rules", "shown", "num_tokens"),
    [
        # the euro sign is two tokens, "ll" and "o," are one each
        ("ab€cdSTOPef", ["STOP"], {}, "ab€cd", 6),
        ("ab€cdSTOPef", ["STOP"], {"include": True}, "ab€cdSTOP", 10),
        ("ab€cdSTOPef", ["€c", "STOP"], {}, "ab", 2),
        ("aaSTOPbSTOP", ["STOP"], {"min_tokens": 5}, "aa", 2),
        ("aaSTOPbSTOP", ["STOP"], {"min_tokens": 6}, "aaSTOPb", 7),
        ("abcdefghST", ["STOP"], {}, "abcdefghST", 10),
        ("STOP", ["STOP"], {}, "", 0),
        ("helllo, x", ["llo"], {}, "hel", 3),
        ("hello, x", [", "], {}, "hello", 4),
    ],
)
def test_runs_do_not_change_what_the_client_sees(tokenizer, text, stops, rules, shown, num_tokens):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    plain = run(make_choice(tokenizer, stops, **rules), outputs_of(tokens, [1] * len(tokens)))
    assert plain[:2] == (shown, tokens[:num_tokens])
    assert plain[4] == num_tokens
    for runs in compositions(len(tokens) - 1):
        for read_every in (1, 3, 100):
            choice = make_choice(tokenizer, stops, **rules)
            assert run(choice, outputs_of(tokens, runs), read_every) == plain, runs


@pytest.mark.parametrize("thinking", ["open", "look"])
def test_runs_do_not_change_where_stop_strings_begin_to_count(tokenizer, thinking):
    """From right after the thinking block on, also where both stand in one run."""
    answer = AnswerRules(thinking=thinking)
    for seed in range(300):
        rng = random.Random(seed)
        thought, said = ("".join(rng.choices("ab€<>", k=rng.randrange(8))) for _ in range(2))
        text = ("<think>" if thinking == "look" else "") + f"{thought}</think>{said}"
        tokens = tokenizer.encode(text, add_special_tokens=False)
        stops = ["".join(rng.choices("ab€<>", k=rng.randrange(1, 3)))]
        cut = said.find(stops[0])
        for runs in ([1] * len(tokens), [len(tokens)], [rng.randrange(1, 5) for _ in tokens]):
            choice = make_choice(tokenizer, stops, answer=answer)
            content = run(choice, outputs_of(tokens, runs))[0]
            assert content == (said if cut < 0 else said[:cut]), f"seed {seed}: {text!r} {stops}"
            assert choice.stop_reason == (None if cut < 0 else stops[0])


def test_random_tokens_random_stops_random_runs(tokenizer):
    for seed in range(400):
        rng = random.Random(seed)
        # bytes of ASCII letters and of the euro sign, whole merges, special tokens
        tokens = rng.choices([97, 98, 0xE2, 0x82, 0xAC, 256, 259, 301], k=rng.randrange(1, 20))
        whole = tokenizer.decode(tokens)
        start = rng.randrange(0, len(whole) + 1)
        stops = [whole[start : start + rng.randrange(1, 4)] or "zz"]
        plain = run(make_choice(tokenizer, stops), outputs_of(tokens, [1] * len(tokens)))
        runs = [rng.randrange(1, 5) for _ in tokens]
        assert run(make_choice(tokenizer, stops), outputs_of(tokens, runs), rng.randrange(1, 4)) == plain, (
            f"seed {seed}"
        )
        cut = whole.find(stops[0])
        # a stop that only the end's U+FFFD completes is not looked for
        if cut >= 0 and plain[2] == "stop":
            # the twin: as many tokens as begin before the cut in a decoding of ever longer prefixes
            prefixes = [tokenizer.decode(tokens[:count]).rstrip("\ufffd") for count in range(len(tokens))]
            begins = [len(prefix) for prefix in prefixes]
            if "\ufffd" not in whole:
                assert plain[4] == sum(begin < cut for begin in begins), f"seed {seed}"
            assert plain[0] == whole[:cut], f"seed {seed}"
            assert plain[1] == tokens[: plain[4]], f"seed {seed}"


def test_a_stop_id_ends_without_text_and_says_which(tokenizer):
    tokens = [65, 66, 7]
    result = run(make_choice(tokenizer), outputs_of(tokens, [2], "stop", 7))
    assert result == ("AB", tokens, "stop", 7, 3)
    result = run(make_choice(tokenizer), outputs_of([65, IM_END], [1], "stop", IM_END))
    assert result == ("A", [65, IM_END], "stop", None, 2)


def test_a_cut_run_is_counted_as_if_tokens_had_come_one_by_one(tokenizer):
    """Metrics see the tokens up to the one that completes the stop string, the answer those that begin before it."""
    choice = make_choice(tokenizer, ["bc"])
    assert choice.feed(RequestOutput(request_id="r", token_ids=[97], round=False)).finish_reason is None
    output = RequestOutput(request_id="r", token_ids=[97, 98, 99, 100], num_drafted=3, num_accepted=3)
    counted = choice.feed(output)
    assert (counted.token_ids, counted.num_drafted, counted.num_accepted) == ([97, 98, 99], 3, 3)
    assert (choice.num_tokens, choice.num_drafted, choice.num_accepted) == (2, 3, 1)


def test_a_stop_string_over_two_rounds_takes_back_drafts_of_the_first(tokenizer):
    choice = make_choice(tokenizer, ["STOP"])
    choice.feed(RequestOutput(request_id="r", token_ids=list(b"a"), round=False))
    choice.feed(RequestOutput(request_id="r", token_ids=list(b"bST"), num_drafted=3, num_accepted=2))
    assert (choice.num_tokens, choice.num_accepted) == (2, 1)
    counted = choice.feed(RequestOutput(request_id="r", token_ids=list(b"OPx"), num_drafted=3, num_accepted=2))
    assert (counted.token_ids, counted.num_accepted) == (list(b"OP"), 2)
    assert (choice.num_tokens, choice.num_drafted, choice.num_accepted) == (2, 6, 1)


def test_first_bytes_of_a_character_wait_for_its_last(tokenizer):
    """They would belong to a stop string that begins with it."""
    choice = make_choice(tokenizer, ["€x"])
    choice.feed(RequestOutput(request_id="r", token_ids=[97, 256], round=False))
    assert [token.token_id for token in choice.take().tokens] == [97]
    choice.feed(RequestOutput(request_id="r", token_ids=[0xAC, 120]))
    piece = choice.take()
    assert (piece.text, piece.tokens, piece.finish_reason, choice.num_tokens) == ("", [], "stop", 1)


def test_an_unfinished_character_at_the_end_is_a_replacement(tokenizer):
    assert run(make_choice(tokenizer), outputs_of([65, 256], [1]))[0] == "A\ufffd"


def test_special_tokens_are_hidden_unless_asked_for(tokenizer):
    tokens = [65, 301, 303, 66]
    assert run(make_choice(tokenizer), outputs_of(tokens, [3]))[0] == "A<think>B"
    shown = run(make_choice(tokenizer, skip_special_tokens=False), outputs_of(tokens, [3]))[0]
    assert shown == "A<|im_start|><think>B"


def test_tokens_come_with_the_text_they_belong_to(tokenizer):
    choice = make_choice(tokenizer, ["STOP"])
    choice.feed(RequestOutput(request_id="r", token_ids=list(b"aST"), round=False))
    piece = choice.take()
    assert (piece.text, [token.token_id for token in piece.tokens]) == ("a", [97])
    choice.feed(RequestOutput(request_id="r", token_ids=list(b"x")))
    piece = choice.take()
    assert (piece.text, [token.token_id for token in piece.tokens]) == ("STx", list(b"STx"))


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ({"error": "full", "error_code": "queue_full", "finish_reason": "error"}, Overloaded),
        ({"error": "bad", "error_code": "invalid", "finish_reason": "error"}, BadRequest),
        ({"error": "broken", "finish_reason": "error"}, EngineFailed),
        ({"finish_reason": "abort"}, Unavailable),
    ],
)
def test_an_error_of_the_engine_becomes_one_for_the_client(tokenizer, output, kind):
    choice = make_choice(tokenizer)
    choice.feed(RequestOutput(request_id="r", **output))
    assert isinstance(choice.error, kind)
    assert choice.ended


def test_each_choice_ends_once_in_the_metrics(tokenizer):
    registry = CollectorRegistry()

    def ended(reason):
        return registry.get_sample_value("pilotfish_request_finished_total", {"finish_reason": reason})

    choice = make_choice(tokenizer, registry=registry)
    choice.give_up()
    choice.give_up()
    assert ended("abort") == 1
    assert sum(ended(reason) for reason in ("stop", "length", "error")) == 0


TOOL_RULES = AnswerRules(thinking="open", tools={"f": {}}, single=True)


def run_parsed(tokenizer, text, runs, **rules):
    """What a client saw of a parsed answer, and the counts."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    choice = make_choice(tokenizer, answer=msgspec.structs.replace(TOOL_RULES, **rules))
    parts, ids = [], []
    for output in outputs_of(tokens, runs, "stop"):
        counted = choice.feed(output)
        if piece := choice.take():
            parts, ids = parts + piece.parts, ids + [token.token_id for token in piece.tokens]
        if counted.finish_reason is not None:
            break
    said = {
        kind: "".join(part.text for part in parts if isinstance(part, Said) and part.kind == kind)
        for kind in ("reasoning", "content")
    }
    return said, tokenizer.decode(ids), choice.finish_reason, choice.num_tokens, choice.num_reasoning_tokens


@pytest.mark.parametrize(
    ("text", "rules", "kept", "finish", "num_reasoning"),
    [
        ("hm</think>ok", {}, "hm</think>ok", "stop", 2),
        ("hm", {}, "hm", "stop", 2),
        ("<think>hm</think>ok", {"thinking": "look"}, "<think>hm</think>ok", "stop", 2),
        ("ok", {"thinking": "look"}, "ok", "stop", 0),
        ("</think><function=f></function>xyz", {}, "</think><function=f></function>", "tool_calls", 0),
        ("</think><function=f></function>xyz", {"single": False}, None, "tool_calls", 0),
        ("a<function=f></function>", {}, "a<function=f></function>", "tool_calls", 24),
        ("a<function=f></func", {}, "a<function=f></func", "stop", 19),
    ],
)
def test_runs_do_not_change_a_parsed_answer(tokenizer, text, rules, kept, finish, num_reasoning):
    plain = run_parsed(tokenizer, text, [1] * 99, **rules)
    kept = text if kept is None else kept
    assert plain[1:] == (kept, finish, len(tokenizer.encode(kept, add_special_tokens=False)), num_reasoning)
    for seed in range(60):
        runs = random.Random(seed).choices([1, 2, 3, 4, 9], k=99)
        assert run_parsed(tokenizer, text, runs, **rules) == plain, runs


def test_a_parsed_answer_shows_markers_that_the_tokenizer_calls_special(tokenizer):
    special = Tokenizer(tokenizer._raw, tokenizer.special_ids | {303})
    choice = make_choice(special, answer=AnswerRules(thinking="look"))
    choice.feed(RequestOutput(request_id="r", token_ids=[303, 65, 301], finish_reason="length"))
    assert choice.take().parts == [Said("reasoning", "A")]


def test_the_wait_in_the_queue_is_the_key_s(tokenizer):
    registry = CollectorRegistry()
    choice = make_choice(tokenizer, registry=registry)
    choice.submit = msgspec.structs.replace(choice.submit, key="team")
    choice.feed(RequestOutput(request_id="r", token_ids=[65], round=False, queue_seconds=0.3))
    choice.feed(RequestOutput(request_id="r", token_ids=[66]))
    assert registry.get_sample_value("pilotfish_request_queue_time_seconds_count", {"key": "team"}) == 1
    assert registry.get_sample_value("pilotfish_request_queue_time_seconds_sum", {"key": "team"}) == 0.3


class RecordingClient:
    def __init__(self):
        self.submitted, self.aborted = [], []

    def submit(self, submit, receive):
        self.submitted.append(submit.request_id)

    def abort(self, request_id):
        self.aborted.append(request_id)


@pytest.mark.parametrize(("length", "steps"), [(10, 0), (40_000, 4)])
def test_others_have_their_turn_while_many_long_prompts_are_submitted(files, length, steps):
    context = Context(model="m", files=files, ready=ready(max_model_len=50_000, kv_pages_total=9999), arrived=0.0)
    plan = plan_completion(CompletionRequest(prompt=[[7] * length], n=8), context)

    async def story(leaves=False):
        client, turns = RecordingClient(), []

        async def other():
            while True:
                turns.append(len(client.submitted))
                await asyncio.sleep(0)

        ticking = asyncio.create_task(other())
        await asyncio.sleep(0)
        turns.clear()
        with (
            contextlib.suppress(asyncio.CancelledError),
            Generation(plan, client, Waker(), files.tokenizer, COLLECTOR) as one,
        ):
            if leaves:
                asyncio.current_task().cancel()
            await one.begin()
        ticking.cancel()
        return client, turns

    client, turns = asyncio.run(story())
    assert len(client.submitted) == 8 and len(turns) == steps
    if steps:
        client, _ = asyncio.run(story(leaves=True))
        assert len(client.submitted) < 8 and set(client.submitted) <= set(client.aborted)


def test_a_loop_is_a_stop_with_its_reason_and_no_stop_string(tokenizer):
    choice = make_choice(tokenizer)
    choice.feed(RequestOutput(request_id="r", token_ids=[65, 65], finish_reason="stop", looped=True))
    piece = choice.take()
    assert (piece.finish_reason, piece.stop_reason, choice.looped) == ("stop", "loop", True)
    # a stop string before the loop is what ended the text
    choice = make_choice(tokenizer, stops=["A"])
    choice.feed(RequestOutput(request_id="r", token_ids=[65, 65], finish_reason="stop", looped=True))
    assert (choice.stop_reason, choice.looped) == ("A", False)
