"""Times, tokens and counters from a scripted endpoint: what the sweep may believe and what it must not."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from pilotfish.deploy.sweep.cell import CellRun, growth, summary
from pilotfish.deploy.sweep.client import Endpoint, EndpointError, TimedAnswer, read_counters, says_something
from pilotfish.deploy.sweep.records import MAX, SweepSettings

USAGE = {"prompt_tokens": 7, "completion_tokens": 40, "total_tokens": 47}


class Script:
    """An endpoint that answers as told and remembers what it was asked."""

    def __init__(self, events=None, status=200, body=None, metrics="", capacity=None, models=None):
        self.events, self.status, self.body, self.metrics = events, status, body, metrics
        self.capacity, self.models = capacity, models or [{"id": "m", "max_model_len": 1000}]
        self.asked = []

    async def answer(self, request):
        self.asked.append((request.path, await request.json(), request.headers.get("Authorization")))
        if self.status != 200:
            return web.json_response(self.body, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        for wait, event in self.events or STREAM:
            await asyncio.sleep(wait)
            await response.write(
                b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
            )
        return response

    async def get(self, request):
        if request.path == "/v1/models":
            return web.json_response({"data": self.models})
        if request.path == "/v1/capacity" and self.capacity:
            return web.json_response(self.capacity)
        if request.path == "/metrics" and self.metrics:
            return web.Response(text=self.metrics() if callable(self.metrics) else self.metrics)
        return web.Response(status=404, text="not here")


def text(words):
    return {"choices": [{"index": 0, "text": words, "finish_reason": None}]}


STREAM = [
    (0.05, text("a")),
    (0.1, text("b c d")),
    (0.0, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}),
    (0.0, {"choices": [], "usage": USAGE}),
    (0.0, b"[DONE]"),
]


def against(script, story, **options):
    async def whole():
        app = web.Application()
        app.router.add_post("/{path:.*}", script.answer)
        app.router.add_get("/{path:.*}", script.get)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            async with aiohttp.ClientSession() as http:
                return await story(Endpoint(http, f"http://{host}:{port}/v1/", **options))
        finally:
            await runner.cleanup()

    return asyncio.run(whole())


def complete(script, path="completions", **options):
    return against(script, lambda endpoint: endpoint.complete(path, "Hi", {"max_tokens": 40}), **options)


def test_tokens_are_those_of_usage_and_never_events():
    answer = complete(Script())
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 40)
    assert 0.05 <= answer.first_seconds < answer.seconds
    # 39 tokens after the first one, in what passed after it
    assert answer.decode_rate == pytest.approx(39 / (answer.seconds - answer.first_seconds))


def test_a_chats_opening_event_is_no_token():
    def delta(**fields):
        return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}

    events = [(0.0, delta(role="assistant", content="")), (0.1, delta(content="x")), (0.05, delta(content="y"))]
    answer = complete(Script(events=[*events, (0.0, {"choices": [], "usage": USAGE})]), path="chat")
    assert answer.first_seconds >= 0.1


@pytest.mark.parametrize("ours", [True, False])
def test_our_own_server_reads_every_prompt_anew(ours):
    """A prompt that was sent before would be remembered; others may not know the field."""

    async def twice(endpoint):
        await endpoint.describe()
        for _ in range(2):
            await endpoint.complete("completions", "Hi", {"max_tokens": 40})

    script = Script(capacity={"max_num_seqs": 4} if ours else None)
    against(script, twice)
    salts = {body.get("cache_salt") for _, body, _ in script.asked}
    assert salts == {None} if not ours else None not in salts and len(salts) == 2


def test_a_stream_without_usage_cannot_be_counted():
    with pytest.raises(EndpointError, match="usage"):
        complete(Script(events=STREAM[:2]))


def test_an_error_in_the_stream_is_the_requests_error():
    with pytest.raises(EndpointError, match="it broke"):
        complete(Script(events=[STREAM[0], (0.0, {"error": {"message": "it broke"}})]))


def test_a_refusal_is_told_in_its_own_words():
    body = {"error": {"message": "unknown field ignore_eos"}}
    with pytest.raises(EndpointError, match=r"^POST completions: 400 unknown field ignore_eos$"):
        complete(Script(status=400, body=body))


def test_requests_ask_for_usage_and_carry_the_key_and_the_model():
    script = Script()

    async def story(endpoint):
        await endpoint.describe()
        await endpoint.complete("completions", "Hi", {"max_tokens": 3})
        await endpoint.complete("chat", "Hi", {"max_tokens": 3})

    against(script, story, key="secret")
    (one, first, key), (two, second, _) = script.asked
    assert (one, two, key) == ("/v1/completions", "/v1/chat/completions", "Bearer secret")
    assert first["prompt"] == "Hi" and second["messages"] == [{"role": "user", "content": "Hi"}]
    for body in (first, second):
        assert body["stream_options"] == {"include_usage": True} and body["model"] == "m" and body["max_tokens"] == 3


def test_describe_works_without_our_capacity_endpoint():
    assert against(Script(), lambda endpoint: endpoint.describe()) == {"max_model_len": 1000}
    facts = against(Script(capacity={"num_speculative_tokens": 3}), lambda endpoint: endpoint.describe())
    assert facts == {"max_model_len": 1000, "num_speculative_tokens": 3}


def test_a_model_that_is_not_served_is_named():
    with pytest.raises(EndpointError, match="it serves m"):
        against(Script(), lambda endpoint: endpoint.describe(), model="other")


def test_counters_of_ours_and_of_vllm():
    ours = """# HELP pilotfish_spec_decode_num_drafts_total x
pilotfish_spec_decode_num_drafts_total 10.0
pilotfish_spec_decode_num_draft_tokens_total 30.0
pilotfish_spec_decode_num_draft_tokens_per_pos_total{position="0"} 10.0
pilotfish_spec_decode_num_accepted_tokens_total 1.2e+01
"""
    assert read_counters(ours) == {"num_drafts": 10, "num_draft_tokens": 30, "num_accepted_tokens": 12}
    vllm = ours.replace("pilotfish_", "vllm:").replace("_total ", '_total{engine="0",model_name="m"} ')
    assert read_counters(vllm) == {"num_drafts": 10, "num_draft_tokens": 30, "num_accepted_tokens": 12}
    assert read_counters("up 1\n") is None


def test_growth_is_a_difference_or_nothing():
    before = {"num_drafts": 5, "num_draft_tokens": 15, "num_accepted_tokens": 9}
    after = {"num_drafts": 8, "num_draft_tokens": 24, "num_accepted_tokens": 10}
    assert growth(before, after) == {"drafts": 3, "drafted": 9, "accepted": 1}
    assert growth(None, after) == {"drafts": None, "drafted": None, "accepted": None}


def test_several_answers_count_together_over_the_wall_time():
    answers = [TimedAnswer(10, 100, 0.5, 4.0), TimedAnswer(30, 60, 1.5, 2.0)]
    one = summary(answers, 4.0, "completions", "direct", growth(None, None))
    assert (one.completion_tokens, one.tokens_per_second, one.slowest_seconds) == (160, 40.0, 4.0)
    assert (one.first_token_seconds, one.context, one.concurrency) == (1.0, 20, 2)


def test_answers_of_one_token_have_no_rate():
    assert TimedAnswer(1, 1, 0.5, 0.5).decode_rate == 0.0
    assert TimedAnswer(1, 5, 0.5, 0.5).decode_rate == 0.0


def run_cell(script, **settings):
    wanted = {
        "model": "m",
        "domains": ("code", "essay"),
        "passes": 3,
        "concurrency": (3,),
        "contexts": (50, 10_000, MAX),
    }
    told = []

    async def story(endpoint):
        run = CellRun(SweepSettings(**(wanted | settings)), endpoint, None, 1000, lambda what, share: told.append(what))
        return await run.run(4), run.notes

    measured, notes = against(script, story)
    return measured, notes, told


FAST = [(0.0, event) for _, event in STREAM]


def test_the_first_pass_is_discarded_and_every_other_kept():
    measured, _, told = run_cell(Script(events=FAST), concurrency=(), contexts=())
    shown = [(one.path, one.domain, one.number) for one in measured]
    assert shown == [
        (path, domain, n) for path in ("completions", "chat") for domain in ("essay", "code") for n in (1, 2)
    ]
    assert len(told) == 2 * 2 * 3


def test_a_single_pass_is_kept():
    measured, _, _ = run_cell(Script(events=FAST), passes=1, concurrency=(), contexts=(), paths=("chat",))
    assert [one.number for one in measured] == [0, 0]


def test_requests_at_once_all_differ():
    script = Script(events=FAST)
    measured, _, _ = run_cell(script, passes=1, paths=("completions",), concurrency=(6,), contexts=())
    prompts = [body["prompt"] for _, body, _ in script.asked[-6:]]
    assert len(set(prompts)) == 6
    assert measured[-1].concurrency == 6 and measured[-1].completion_tokens == 240


def test_contexts_that_do_not_fit_are_left_out_and_max_is_the_longest_that_does():
    measured, notes, _ = run_cell(Script(events=FAST), concurrency=())
    assert [one.kind for one in measured].count("long") == 2 and notes == []


def test_counters_are_read_around_each_measurement():
    drafts = iter(range(0, 1000, 5))
    script = Script(events=FAST, metrics=lambda: f"vllm:spec_decode_num_drafts_total {next(drafts)}\n")
    measured, _, _ = run_cell(script, concurrency=(), contexts=())
    assert {one.drafts for one in measured} == {5}


@pytest.mark.parametrize("name", ["content", "reasoning", "reasoning_content"])
def test_whatever_a_chat_calls_its_output_is_output(name):
    assert says_something({"choices": [{"delta": {name: "x"}}]})
    assert not says_something({"choices": [{"delta": {"role": "assistant", name: ""}}]})
    assert not says_something({"choices": [], "usage": {}})


def test_single_streams_go_through_the_relay_too():
    """The relay answers, the server itself is asked for its counters."""
    script = Script(events=FAST, metrics="vllm:spec_decode_num_drafts_total 5\n")
    settings = SweepSettings(model="m", domains=("code",), passes=1, concurrency=(), contexts=(), relay="http://relay")

    async def story(endpoint):
        run = CellRun(settings, endpoint, endpoint, 1000, lambda what, share: None)
        return await run.run(4)

    shown = [(one.via, one.path) for one in against(script, story)]
    assert shown == [("direct", "completions"), ("direct", "chat"), ("relay", "completions"), ("relay", "chat")]
