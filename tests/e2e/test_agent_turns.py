"""Five turns as Claude Code 2.1 and Codex 0.171 send them, on the demo model: what the cuts allow is cached.

The bodies have the shapes that these clients sent on 2026-12-01 (and Claude Code's changing lines, as it sends them to
some addresses), with shorter texts. tests/clients/check_cache.py runs the clients themselves.
"""

import json
import urllib.request
from pathlib import Path

import openai
import pytest
from cached_turns import allowed, grid_of, record, shared
from serving import serving_in_thread

DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"
CORE = "pilotfish.engine.start:make_core"
SYSTEM = "You are an interactive agent that helps users with software engineering tasks. " * 14
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}}}
NAMES = ("Bash", "Read", "Edit")
NEW_TURN = 12
"""Tokens at a prompt's end with which the template begins an answer: they may go when the answer stands there."""


@pytest.fixture(scope="module")
def served():
    """(server, the prompts that its engine is asked)"""
    engine = {
        "num_speculative_tokens": 3,
        "max_model_len": 4096,
        "num_threads": 1,
        "max_num_seqs": 2,
        "cost_table": False,
    }
    with serving_in_thread(DEMO, core=CORE, engine=engine, any_model_name=True) as server:
        yield server, record(server)


def post(server, path, body):
    """The events of a stream."""
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return [json.loads(line[6:]) for line in response.read().decode().splitlines() if line.startswith("data: {")]


def claude_turn(number):
    """A user's question, three commands, and one more question: what was thought before it is dropped."""
    reminder = "<system-reminder>\nToday's date is 2026-12-01.\n</system-reminder>\n\n"
    asked = [{"type": "text", "text": reminder}, {"type": "text", "text": "What is in a.txt?"}]
    messages = [{"role": "user", "content": asked}, {"role": "system", "content": "Agent types: claude, for any task."}]
    for call in range(min(number, 3)):
        tool_id = f"toolu_{call}"
        thought = {"type": "thinking", "thinking": f"I look for the {call}. time.", "signature": "msg_1"}
        use = {"type": "tool_use", "id": tool_id, "name": "Bash", "input": {"command": f"cat a{call}.txt"}}
        result = {"type": "tool_result", "tool_use_id": tool_id, "content": f"line {call} of the file\n" * 12}
        messages += [{"role": "assistant", "content": [thought, use]}, {"role": "user", "content": [result]}]
    if number == 4:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": "It has lines."}]})
        messages.append({"role": "user", "content": [{"type": "text", "text": "How many?"}]})
    messages[-1 if number else 0]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    left = f"<total_tokens>{15_000_000 - 999 * number} tokens left</total_tokens>"
    messages.append({"role": "system", "content": left})
    billing = f"x-anthropic-billing-header: cc_version=2.1.197.a5a; cc_entrypoint=cli; cch={number * 70_001:05x};"
    return "/v1/messages?beta=true", {
        "model": "model",
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are a Claude agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "\n" + SYSTEM, "cache_control": {"type": "ephemeral"}},
        ],
        "messages": messages,
        "tools": [{"name": name, "description": f"Runs {name}. " * 6, "input_schema": SCHEMA} for name in NAMES],
        "metadata": {"user_id": f"session_{number}"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "max_tokens": 4,
        "stream": True,
    }


def codex_turn(number):
    def said(role, text, kind="input_text"):
        return {"type": "message", "id": f"msg_{role}", "role": role, "content": [{"type": kind, "text": text}]}

    items = [said("developer", SYSTEM), said("developer", "Approvals: never."), said("user", "<cwd>/work</cwd>")]
    for turn in range(number + 1):
        items.append(said("user", f"Question {turn}: what is in a{turn}.txt?"))
        if turn < number:
            call = {"call_id": f"call_{turn}", "name": "exec_command", "arguments": json.dumps({"command": "cat"})}
            items.append({"type": "function_call", "id": f"fc_{turn}", **call})
            output = f"line {turn} of the file\n" * 12
            items.append({"type": "function_call_output", "call_id": f"call_{turn}", "output": output})
            items.append(said("assistant", f"It has {turn} lines.", "output_text"))
    function = {"type": "function", "name": "exec_command", "strict": False, "parameters": SCHEMA}
    return "/v1/responses", {
        "model": "model",
        "input": items,
        "tools": [function, {"type": "namespace", "name": "mcp", "tools": [{**function, "name": "add"}]}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0192",
        "client_metadata": {"turn": str(number)},
        "max_output_tokens": 4,
        "stream": True,
    }


def told_by(events):
    """(prompt, cached) tokens as the stream's end tells them."""
    if events[0]["type"] == "message_start":
        usage = events[-2]["usage"]
        parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        return sum(usage[name] for name in parts), usage["cache_read_input_tokens"]
    usage = events[-1]["response"]["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("turn_of", [claude_turn, codex_turn])
def test_what_the_cuts_allow_is_cached(served, turn_of):
    server, sent = served
    grid, first = grid_of(server), len(sent)
    for number in range(5):
        path, body = turn_of(number)
        told = told_by(post(server, path, body))
        assert told == (len(sent[-1].ids), sent[-1].cached)
    turns = range(first + 1, first + 5)
    for number in turns:
        assert sent[number].cached == allowed(sent, number, grid)
    # nothing but the answer's own beginning, and what was thought before a new question, is lost
    kept = [len(sent[number - 1].ids) - shared(sent, number) for number in turns]
    assert all(lost <= NEW_TURN for lost in (kept[:-1] if turn_of is claude_turn else kept))
    assert all(sent[number].cached >= grid.chunk for number in turns)
    assert len({entry.system for entry in sent[first:]}) == 1
    assert min(shared(sent, number) for number in turns) >= sent[first].system


def test_a_conversation_has_the_text_of_cold_turns(served):
    """Turns of what the model really answers, by the official client: sampled, with log-probabilities."""
    server, _ = served
    messages = [{"role": "system", "content": SYSTEM}]
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=120) as client:
        for turn in range(2):
            messages.append({"role": "user", "content": f"Question {turn}: what is a pilot fish?"})
            asked = {"model": "model", "messages": messages, "seed": 7, "max_tokens": 8, "logprobs": True}
            warm, cold = (
                client.chat.completions.create(**asked, extra_body={"cache_salt": salt})
                for salt in ("one conversation", f"cold {turn}")
            )
            assert warm.choices[0].message == cold.choices[0].message
            assert warm.choices[0].logprobs == cold.choices[0].logprobs
            assert cold.usage.prompt_tokens_details.cached_tokens == 0
            assert (warm.usage.prompt_tokens_details.cached_tokens > 0) == (turn > 0)
            messages.append({"role": "assistant", "content": warm.choices[0].message.content})


def test_choices_of_one_prompt_read_it_once(served):
    server, _ = served
    text = "Once upon a time there was a small fish. " * 40
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=120) as client:
        asked = {"model": "model", "prompt": text, "n": 3, "max_tokens": 4, "seed": 1}
        first, second = (client.completions.create(**asked) for _ in range(2))
    assert first.choices == second.choices
    boundary = grid_of(server).last_boundary(first.usage.prompt_tokens)
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, second)]
    assert cached == [0, boundary] and boundary > 0


def test_totals_add_up_to_what_answers_told(served):
    server, sent = served
    post(server, *claude_turn(0))

    def get(path):
        with urllib.request.urlopen(server.url + path, timeout=120) as response:
            return response.read().decode()

    status, capacity = json.loads(get("/v1/cache")), json.loads(get("/v1/capacity"))
    assert status["queried_tokens"] == sum(len(entry.ids) for entry in sent)
    assert status["hit_tokens"] == sum(entry.cached for entry in sent)
    assert 0 < status["snapshots"] <= capacity["prefix_cache"]["snapshots"]
    assert status["snapshot_bytes"] == capacity["prefix_cache"]["snapshot_bytes"]
    assert status["snapshots"] * status["snapshot_bytes"] < status["bytes"] <= status["capacity_bytes"]
    metrics = dict(line.rsplit(" ", 1) for line in get("/metrics").splitlines() if line[0] != "#")
    for name, key in (("queries_total", "queried_tokens"), ("hits_total", "hit_tokens"), ("bytes", "bytes")):
        assert float(metrics[f"pilotfish_prefix_cache_{name}"]) == status[key]
    assert sum(status["misses"].values()) == len(status["last_misses"]) > 0
    assert all(miss["cached_tokens"] < miss["allowed_tokens"] for miss in status["last_misses"])
