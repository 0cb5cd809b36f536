"""Requests to engine parameters: defaults, limits, prompts in their four forms."""

import json

import msgspec
import pytest
from byte_model import END, IM_END
from loaded import ready

from pilotfish.server.chat.request import ChatRequest, tokens_of
from pilotfish.server.completions.request import CompletionRequest
from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes
from pilotfish.server.model_files import SamplingDefaults
from pilotfish.server.plan import Context, count_prompt, plan_chat, plan_completion
from pilotfish.server.protocol import TokenizeRequest, decode_request
from pilotfish.server.text.chat_template import ChatTemplate
from pilotfish.server.text.prompts import check_ids, most_counted

READY = ready(max_model_len=100, max_waiting=8, kv_pages_total=10, page_size=16)
USER = [{"role": "user", "content": "hi"}]


def complete(files, ready=READY, **fields):
    request = decode_request(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest)
    return plan_completion(request, Context(model="m", files=files, ready=ready, arrived=0.0))


def chat(files, ready=READY, **fields):
    request = decode_request(json.dumps({"messages": USER, **fields}).encode(), ChatRequest)
    return plan_chat(request, Context(model="m", files=files, ready=ready, arrived=0.0))


def refusal(call, files, **fields):
    with pytest.raises(BadRequest) as caught:
        call(files, **fields)
    return caught.value


def with_defaults(files, **values):
    return msgspec.structs.replace(files, defaults=SamplingDefaults(**values))


def test_neutral_values_where_nobody_says_anything(files):
    (params,) = complete(files).sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.max_tokens, params.logprobs) == (1.0, 16, None)
    assert set(params.eos_token_ids) == {END, IM_END}


def test_request_then_checkpoint_then_neutral(files):
    files = with_defaults(files, temperature=0.6, top_k=20, top_p=0.9, max_new_tokens=5)
    (params,) = complete(files, temperature=0).sampling
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.0, 20, 0.9, 5)
    (params,) = complete(files, top_k=-1, top_p=1, max_tokens=9).sampling
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 0, 1.0, 9)


def test_single_tokens_are_kept_for_who_asks_for_them_and_nobody_else(files):
    for plan in (complete, chat):
        assert not plan(files).stops.keep_tokens and not plan(files, speculation={"k": 0}).stops.keep_tokens
        assert plan(files, speculation={"trace": True}).stops.keep_tokens


def test_top_k_beyond_the_vocabulary_is_the_vocabulary(files):
    assert complete(files, top_k=2**63 - 1).sampling[0].top_k == READY.vocab_size
    assert complete(files, top_k=-1).sampling[0].top_k == complete(files, top_k=0).sampling[0].top_k == 0


def test_a_seed_is_drawn_kept_and_shared_by_all_prompts(files):
    plan = complete(files, prompt=["a", "b"])
    assert plan.sampling[0].seed == plan.sampling[1].seed == plan.seed
    assert 0 <= plan.seed < 2**53, "a browser reads it exactly"
    assert complete(files).seed != complete(files).seed
    assert complete(files, seed=-5).seed == -5


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("AB", [[65, 66]]),
        (["A", "B"], [[65], [66]]),
        ([65, 66], [[65, 66]]),
        ([[65], [66, 67]], [[65], [66, 67]]),
        (["A", [66]], [[65], [66]]),
    ],
)
def test_prompts_in_every_form(files, prompt, expected):
    assert [entry.token_ids for entry in complete(files, prompt=prompt).prompts] == expected


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [[]],
        [""],
        [65, "A"],
        [[65, "A"]],
        [True],
        [[True]],
        [None],
        [{}],
        [512],
        [-1],
        [[65], [10**30]],
        [1.5],
    ],
)
def test_bad_prompts_name_the_prompt(files, prompt):
    assert refusal(complete, files, prompt=prompt).param.startswith("prompt")


def test_too_many_prompts(files):
    assert refusal(complete, files, prompt=["a"] * 129).param == "prompt"
    assert refusal(complete, files, prompt=["a"] * 65, n=2).param == "n"


def test_a_prompt_too_long_gives_the_numbers(files):
    for prompt in ("x" * 100, [65] * 100):
        error = refusal(complete, files, prompt=prompt)
        assert error.code == "context_length_exceeded"
        assert "100 tokens" in error.message
    assert complete(files, prompt="x" * 99, max_tokens=1).sampling[0].max_tokens == 1
    assert refusal(chat, files, messages=[{"role": "user", "content": "x" * 100}]).param == "messages"


def test_a_giant_text_is_refused_before_it_is_tokenised(files):
    assert refusal(complete, files, prompt="x" * 10_000_000).code == "context_length_exceeded"


def test_max_tokens_beyond_the_context_is_a_400_with_numbers(files):
    error = refusal(complete, files, prompt="x" * 60, max_tokens=41)
    assert error.param == "max_tokens"
    assert all(number in error.message for number in ("100", "101", "60", "41"))
    assert complete(files, prompt="x" * 60, max_tokens=40).sampling[0].max_tokens == 40


def test_a_default_limit_shrinks_to_what_fits(files):
    prompt = len(chat(files).prompts[0].token_ids)
    assert chat(files).sampling[0].max_tokens == 100 - prompt
    small = msgspec.structs.replace(READY, kv_pages_total=3)
    assert chat(files, small).sampling[0].max_tokens == 48 - prompt - 4
    error = refusal(lambda f, **fields: chat(f, small, **fields), files, max_tokens=60)
    assert "cache" in error.message


def test_max_completion_tokens_is_max_tokens(files):
    assert chat(files, max_completion_tokens=7).sampling[0].max_tokens == 7
    assert chat(files, max_tokens=8).sampling[0].max_tokens == 8
    assert chat(files, max_tokens=8, max_completion_tokens=7).sampling[0].max_tokens == 7


def test_logprobs_of_both_endpoints(files):
    assert complete(files, logprobs=0).sampling[0].logprobs == 0
    assert complete(files, logprobs=5).sampling[0].logprobs == 5
    assert chat(files, logprobs=True).sampling[0].logprobs == 0
    assert chat(files, logprobs=True, top_logprobs=3).sampling[0].logprobs == 3
    assert chat(files, logprobs=False).sampling[0].logprobs is None
    assert refusal(chat, files, top_logprobs=3).param == "top_logprobs"


def test_logit_bias_keys_are_ids_of_the_vocabulary(files):
    assert complete(files, logit_bias={"65": -100, "511": 1.5}).sampling[0].logit_bias == {65: -100.0, 511: 1.5}
    for key in ("512", "-1", "a", "", "٣", " 1", "1" * 10_000, "1.0"):
        assert refusal(complete, files, logit_bias={key: 1}).param == "logit_bias"


def test_stop_ids_are_of_the_vocabulary(files):
    assert complete(files, stop_token_ids=[65, 65, 66]).sampling[0].stop_token_ids == (65, 66)
    assert refusal(complete, files, stop_token_ids=[512]).param == "stop_token_ids"


def test_min_tokens_within_max_tokens(files):
    assert complete(files, min_tokens=16).stops.min_tokens == 16
    assert refusal(complete, files, min_tokens=17).param == "min_tokens"


def test_stream_options_are_about_streams(files):
    assert complete(files, stream=True, stream_options={"include_usage": True}).include_usage
    assert not complete(files, stream_options={"include_usage": True}).stream


def test_no_top_logprobs_ask_for_nothing(files):
    assert chat(files, top_logprobs=0, logprobs=False).sampling[0].logprobs is None
    assert refusal(chat, files, top_logprobs=1).param == "top_logprobs"


@pytest.mark.parametrize("call", [complete, chat])
def test_as_many_tokens_as_fit_and_none(call, files):
    files = with_defaults(files, max_new_tokens=5)
    assert [call(files).sampling[0].max_tokens, call(files, max_tokens=0).sampling[0].max_tokens] == [5, 0]
    (params,), (prompt,) = (plan := call(files, max_tokens=-1)).sampling, plan.prompts
    assert params.max_tokens == READY.max_model_len - len(prompt.token_ids)


def test_completion_tokens_go_before_tokens(files):
    assert chat(files, max_completion_tokens=0, max_tokens=7).sampling[0].max_tokens == 0


def test_echo(files):
    assert complete(files, prompt=["a", [66]], echo=True).prompts[1].text == "B"
    assert complete(files, echo=True, logprobs=1).echoes_logprobs


def test_chat_prompt_and_its_switches(files):
    def text(**fields):
        return files.tokenizer.decode(chat(files, **fields).prompts[0].token_ids, skip_special_tokens=False)

    turn = "<|im_start|>user\nhi<|im_end|>\n"
    assert text() == turn + "<|im_start|>assistant\n"
    assert text(add_generation_prompt=False) == turn
    assert text(chat_template_kwargs={"enable_thinking": True}).endswith("<think>\n")


def test_an_answer_that_is_begun_goes_on(files):
    def begun(text, **fields):
        messages = [*USER, {"role": "assistant", "content": text}]
        return chat(files, messages=messages, continue_final_message=True, **fields)

    plan = begun("Su")
    prompt = files.tokenizer.decode(plan.prompts[0].token_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSu"
    thinking = [begun(text).stops.answer.thinking for text in ("Su", "<think>\nHm", "<think>\nHm</think>\nSu")]
    assert thinking == ["none", "open", "none"]
    assert refusal(chat, files, continue_final_message=True).param == "continue_final_message"
    assert refusal(begun, "Su", add_generation_prompt=True).param == "continue_final_message"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert refusal(begun, "Su", tools=tools, tool_choice="required").param == "add_generation_prompt"


def test_a_strange_effort_is_refused_where_no_template_reads_it(files):
    assert refusal(chat, files, reasoning_effort="immense").param == "reasoning_effort"
    assert chat(files, reasoning_effort="low")


def test_without_a_template_chat_says_so(files):
    assert "chat template" in refusal(chat, msgspec.structs.replace(files, chat_template=None)).message


def test_tools_want_a_template_that_shows_them(files):
    tools = [{"type": "function", "function": {"name": "f"}}]
    for other in (
        msgspec.structs.replace(files, parses_tool_calls=False),
        msgspec.structs.replace(files, chat_template=ChatTemplate("{{ messages[0].content }}")),
    ):
        assert refusal(chat, other, tools=tools).param == "tools"
        assert chat(other, tools=tools, tool_choice="none").stops.answer.tools is None


def test_where_thinking_may_be(files):
    def thinking(files, **values):
        return chat(files, chat_template_kwargs=values).stops.answer.thinking

    assert thinking(files) == "look"
    assert thinking(files, enable_thinking=True) == "open"
    assert chat(msgspec.structs.replace(files, parses_reasoning=False)).stops.answer is None


def test_a_request_may_speculate_less_but_not_more(files):
    assert complete(files).speculative_k == complete(files, speculation={}).speculative_k == 3
    assert [complete(files, speculation={"k": k}).speculative_k for k in range(4)] == [0, 1, 2, 3]
    assert refusal(complete, files, speculation={"k": 4}).param == "speculation.k"


def test_what_cannot_fit_is_refused_before_it_is_tokenised(files, monkeypatch):
    monkeypatch.setattr(files.tokenizer, "encode", lambda *_, **__: pytest.fail("tokenised"))
    monkeypatch.setattr(files.chat_template, "render", lambda *_, **__: "word " * 300_000)
    text = "The quick, brown fox. " * 100_000
    for call, fields in (
        (complete, {"prompt": text}),
        (complete, {"prompt": [text, text]}),
        (chat, {}),
    ):
        error = refusal(call, files, **fields)
        assert error.code == "context_length_exceeded" and "at least" in error.message
    for count in (
        lambda: tokens_of(TokenizeRequest(prompt=text), files, READY, FieldNotes()),
        lambda: count_prompt(ChatRequest(messages=USER), Context(model="m", files=files, ready=READY, arrived=0.0)),
    ):
        with pytest.raises(BadRequest) as caught:
            count()
        assert caught.value.code == "context_length_exceeded"


def test_more_messages_than_tokens_are_not_rendered(files, monkeypatch):
    monkeypatch.setattr(files.chat_template, "render", lambda *_, **__: pytest.fail("rendered"))
    assert refusal(chat, files, messages=USER * 101).param == "messages"


def test_room_is_asked_for_before_anything_is_tokenised(files, monkeypatch):
    monkeypatch.setattr(files.tokenizer, "encode", lambda *_, **__: pytest.fail("tokenised"))
    asked = []

    def check_room(num_sequences):
        asked.append(num_sequences)
        raise BadRequest("no room")

    context = Context(model="m", files=files, ready=READY, arrived=0.0, check_room=check_room)
    for request, num_sequences in ((CompletionRequest(prompt=["a", "b"], n=3), 6), (CompletionRequest(prompt="a"), 1)):
        with pytest.raises(BadRequest, match="no room"):
            plan_completion(request, context)
        assert asked.pop() == num_sequences
    with pytest.raises(BadRequest, match="no room"):
        plan_chat(ChatRequest(messages=USER, n=5), context)
    assert asked == [5]


def test_ids_are_turned_into_text_up_to_a_bound():
    check_ids([0] * most_counted(READY), READY)
    with pytest.raises(BadRequest) as caught:
        check_ids([0] * (most_counted(READY) + 1), READY)
    assert caught.value.param == "tokens"


def test_a_prompts_last_tokens_are_kept(files):
    long = "x" * 90 + "abcde"
    assert bytes(complete(files, prompt=long, truncate_prompt_tokens=3).prompts[0].token_ids) == b"cde"
    assert bytes(complete(files, prompt=list(long.encode()), truncate_prompt_tokens=3).prompts[0].token_ids) == b"cde"
    assert complete(files, prompt=long, truncate_prompt_tokens=3, echo=True).prompts[0].text == "cde"
    assert len(complete(files, prompt=long, truncate_prompt_tokens=500).prompts[0].token_ids) == 95
    # a prompt beyond the context is none any more
    fitting = complete(files, prompt="x" * 5000, truncate_prompt_tokens=-1, max_tokens=30)
    assert len(fitting.prompts[0].token_ids) == 70 and fitting.sampling[0].max_tokens == 30
    message = [{"role": "user", "content": "x" * 5000}]
    assert len(chat(files, messages=message, truncate_prompt_tokens=50).prompts[0].token_ids) == 50
    assert len(chat(files, messages=message, truncate_prompt_tokens=-1).prompts[0].token_ids) == 99
    assert refusal(complete, files, prompt=long, truncate_prompt_tokens=0).param == "truncate_prompt_tokens"
    assert refusal(complete, files, prompt="x" * 5000, truncate_prompt_tokens=200).code == "context_length_exceeded"


def test_a_client_may_name_its_answer(files):
    """Two requests of one name are two to the engine."""
    first, second = (complete(files, request_id="job-7") for _ in range(2))
    assert first.id == second.id == "cmpl-job-7"
    assert first.engine_id != second.engine_id
    for name in ("", "a b", "é", "x" * 129):
        assert refusal(complete, files, request_id=name).param == "request_id"


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({}, "on,a"),
        ({"chat_template_kwargs": {"word": "b"}}, "on,b"),
        # what a request says of thinking goes before what the server sets
        ({"thinking": {"type": "disabled"}}, "off,a"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "off,a"),
    ],
)
def test_a_server_s_switches_are_those_that_a_request_says_nothing_of(files, fields, seen):
    template = ChatTemplate("{{ 'on' if enable_thinking else 'off' }},{{ word }}")
    values = {"enable_thinking": True, "word": "a"}
    files = msgspec.structs.replace(files, chat_template=template, template_values=values)
    (prompt,) = chat(files, **fields).prompts
    assert files.tokenizer.decode(prompt.token_ids) == seen


def test_salts_of_owners_never_meet(files):
    def salt(owner, **fields):
        body = json.dumps({"prompt": "hi", **fields}).encode()
        context = Context(model="m", files=files, ready=READY, arrived=0.0, cache_owner=owner)
        return plan_completion(decode_request(body, CompletionRequest), context).cache_salt

    assert (salt(""), salt("", cache_salt="x"), salt("1")) == ("", "x", "1:")
    salts = [salt(owner, **fields) for owner in ("a", "a.b", "1", "none") for fields in ({}, {"cache_salt": "b:a"})]
    assert len(set(salts)) == len(salts)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 64])
def test_what_stays_of_a_prompt_ends_at_a_boundary(files, length):
    keeps = ready(max_model_len=100, page_size=16, prefill_chunk=32, prefix_caching=True)
    (kept,) = (prompt.num_kept for prompt in complete(files, keeps, prompt="x" * length, max_tokens=1).prompts)
    assert kept == (length // 32 * 32 or (16 if length >= 16 else 0))
    for off in (READY, ready(max_model_len=100, page_size=16, prefill_chunk=32)):
        assert complete(files, off, prompt="x" * length, max_tokens=1).prompts[0].num_kept == 0


@pytest.mark.parametrize("role", ["system", "developer"])
def test_volatile_lines_are_left_out_wherever_a_prompt_is_made_or_counted(files, role):
    line = "x-anthropic-billing-header: cc_version=1; cch=00000;"
    messages = [{"role": role, "content": f"{line}\nBe brief."}, *USER]
    roomy = msgspec.structs.replace(READY, max_model_len=500, kv_pages_total=100)
    seen = []
    context = Context(model="m", files=files, ready=roomy, arrived=0.0, notes=FieldNotes(on_volatile=seen.append))
    request = ChatRequest(messages=messages)
    (prompt,) = plan_chat(request, context).prompts
    text = files.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    assert "Be brief." in text and "billing" not in text
    assert count_prompt(request, context) == len(prompt.token_ids)
    assert tokens_of(TokenizeRequest(messages=messages), files, roomy, context.notes) == prompt.token_ids
    assert seen == ["billing_header"] * 3
    kept = msgspec.structs.replace(context, files=msgspec.structs.replace(files, volatile_lines="keep"))
    (whole,) = plan_chat(request, kept).prompts
    assert line in files.tokenizer.decode(whole.token_ids) and len(seen) == 3
