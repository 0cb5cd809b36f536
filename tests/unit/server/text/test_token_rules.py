"""Words and budgets become ids: with and without a space, in a block that template or model opens."""

import json
from pathlib import Path

import msgspec
import pytest
from byte_model import write_model

from pilotfish.engine.link.messages import LoopRule
from pilotfish.server.chat.request import ChatRequest
from pilotfish.server.errors import BadRequest
from pilotfish.server.model_files import load_model_files
from pilotfish.server.plan import Context, plan_chat
from pilotfish.server.protocol import decode_request
from pilotfish.server.text.token_rules import bad_words_ids
from tests.unit.server.test_plan import READY

DEMO = Path(__file__).resolve().parents[4] / "demo" / "model"
VOCAB = 8192


@pytest.fixture(scope="module")
def demo():
    return load_model_files(DEMO)


def plan(files, **fields):
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    ready = READY.__class__(
        **{name: getattr(READY, name) for name in READY.__struct_fields__} | {"vocab_size": VOCAB, "kv_pages_total": 99}
    )
    context = Context(model="m", files=files, ready=ready, arrived=0.0)
    return plan_chat(decode_request(json.dumps(body).encode(), ChatRequest), context).sampling[0]


def test_a_word_is_banned_at_the_beginning_and_after_a_space(demo):
    tokenizer = demo.tokenizer
    for word in ("the", "hello", "Zürich", "to be"):
        found = bad_words_ids([word], tokenizer, VOCAB)
        texts = [tokenizer.decode(list(ids), skip_special_tokens=False) for ids in found]
        assert texts[0] == word
        assert set(texts[1:]) <= {" " + word}
    # a space joins the first letters: as many tokens, another first one
    assert len(bad_words_ids(["the"], tokenizer, VOCAB)) == 2
    assert bad_words_ids([" the"], tokenizer, VOCAB) == bad_words_ids(["the", "the"], tokenizer, VOCAB)


def test_words_that_cannot_be_banned_are_refused(demo):
    with pytest.raises(BadRequest, match="blank") as caught:
        bad_words_ids(["a", "  "], demo.tokenizer, VOCAB)
    assert caught.value.param == "bad_words[1]"
    with pytest.raises(BadRequest, match="below 10"):
        bad_words_ids(["hello"], demo.tokenizer, 10)


@pytest.mark.parametrize("on", (True, False))
def test_a_budget_counts_from_where_the_block_opens(demo, on):
    rule = plan(demo, thinking_token_budget=7, chat_template_kwargs={"enable_thinking": on}).thinking
    start, end = (demo.tokenizer.token_to_id(marker) for marker in ("<think>", "</think>"))
    assert (rule.num_tokens, rule.end_token_id, rule.closing) == (7, end, (end,))
    assert rule.start_token_id == (None if on else start)


def test_the_end_of_a_spent_block_can_be_set():
    text = "\nTime to answer.\n</think>\n\n"
    files = load_model_files(DEMO, reasoning_end=text)
    closing = plan(files, thinking_token_budget=0).thinking.closing
    assert files.tokenizer.decode(list(closing), skip_special_tokens=False) == text


def test_without_a_budget_or_thought_there_is_no_rule(demo):
    tool = {"type": "function", "function": {"name": "f"}}
    assert plan(demo).thinking is None
    assert plan(demo, thinking_token_budget=5, tools=[tool], tool_choice="required").thinking is None


def test_models_without_a_thinking_block_have_no_budget(tmp_path):
    tokenizer = write_model(tmp_path) / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("</think>", "</thought>"))
    untold, without = load_model_files(DEMO, reasoning_parser="none"), load_model_files(tmp_path)
    for strange, word in ((untold, "told apart"), (without, "no tokens")):
        with pytest.raises(BadRequest, match=word) as caught:
            plan(strange, thinking_token_budget=5)
        assert caught.value.param == "thinking_token_budget"


def test_allowed_ids_are_checked_and_kept_once(demo):
    assert plan(demo, allowed_token_ids=[5, 9, 5]).allowed_token_ids == (5, 9)
    for ids in ([], [VOCAB], [-1], ["x"]):
        with pytest.raises(BadRequest) as caught:
            plan(demo, allowed_token_ids=ids)
        assert caught.value.param.startswith("allowed_token_ids")


@pytest.mark.parametrize(
    "default, fields, rule",
    [
        (None, {}, None),
        (None, {"loop_guard": True}, LoopRule()),
        (None, {"loop_guard": {"repeats": 3, "tokens": 9}}, LoopRule(3, 9)),
        (LoopRule(5, 50), {}, LoopRule(5, 50)),
        (LoopRule(5, 50), {"loop_guard": True}, LoopRule(5, 50)),
        (LoopRule(5, 50), {"loop_guard": False}, None),
        (LoopRule(5, 50), {"repetition_detection": {"max_pattern_size": 0}}, None),
        (None, {"repetition_detection": {"max_pattern_size": 8, "min_count": 3}}, LoopRule(3, 0, 1, 8)),
        (
            None,
            {"repetition_detection": {"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 3}},
            LoopRule(3, 0, 2, 8),
        ),
    ],
)
def test_the_request_goes_before_the_server_about_loops(demo, default, fields, rule):
    sampling = plan(msgspec.structs.replace(demo, loop_rule=default), **fields)
    assert sampling.loop_rule == rule
    # a block that loops can be closed, where there is one, though nothing bounds it
    assert (sampling.thinking is not None) == (rule is not None and demo.parses_reasoning)


@pytest.mark.parametrize(
    "fields",
    (
        {"loop_guard": True, "repetition_detection": {"max_pattern_size": 8, "min_count": 3}},
        {"repetition_detection": {"max_pattern_size": 8, "min_pattern_size": 9, "min_count": 3}},
        {"repetition_detection": {"max_pattern_size": 8, "min_count": 1}},
        {"loop_guard": {"repeats": 1}},
        {"loop_guard": 1},
    ),
)
def test_loop_rules_that_mean_nothing_are_refused_by_name(demo, fields):
    with pytest.raises(BadRequest) as refused:
        plan(demo, **fields)
    assert refused.value.param.partition(".")[0] in fields
