"""Every boot gate passes what it should, and fails for the one thing it is there to see; reports in both forms."""

import copy
import json
import subprocess

import pytest

from pilotfish.deploy.gate import after, audit, command, facts, quality, requests
from pilotfish.deploy.gate.gate import CannotRun, Found, Subject, Wanted
from pilotfish.deploy.gate.server import Metrics, Refused, Unreachable
from pilotfish.spec.slots import MAX_BAD_LENGTH

PACKED, FALLBACK = "mkldnn::_linear_pointwise bfloat16", "aten::linear bfloat16"
GIB = 1 << 30
CAPACITY = {
    "device": "cpu",
    "dtype": "bfloat16",
    "max_num_seqs": 4,
    "memory": {"weights_bytes": GIB, "free_bytes": 4 * GIB, "total_bytes": 7 * GIB},
    "execution": {
        "num_layers": 3,
        "kv_dtype": "bfloat16",
        "state_dtype": "float32",
        "head_weights": [15, 15],
        "routes": {
            PACKED: ["layers.0", "layers.1", "layers.2", "lm_head", "head", "prefill"],
            "aten::matmul float32": ["layers.1"],
        },
    },
}
SPECULATION = {
    "num_speculative_tokens": 3,
    "disabled_reason": None,
    "draft_head": "MTP head of the checkpoint",
    "head_check": {"verdict": "ok", "trunk_top1": 0.5, "head_top1": [0.5, 0.4, 0.4]},
}
METRICS = {
    'rounds_total{path="eager"}': 12,
    'rounds_total{path="graph"}': 0,
    "kernels_compiled_total": 0,
    "memory_used_bytes": 3 * GIB,
    "engine_up": 1,
    "engine_restarts_total": 0,
    "engine_ready_timestamp_seconds": 1000,
    "generation_tokens_total": 0,
    'request_finished_total{finish_reason="stop"}': 0,
    "spec_decode_num_draft_tokens_total": 0,
}


def exposition(values):
    return "".join(f"pilotfish_{name} {value}\n" for name, value in values.items())


class Fake:
    """A server that answers by path from a table; a function gets the body. Metrics come one scrape after the other."""

    def __init__(self, answers=None, scrapes=({},), asked=1):
        self.answers = {"/v1/capacity": copy.deepcopy(CAPACITY), "/health": {"speculation": dict(SPECULATION)}}
        self.answers |= answers or {}
        self.scrapes = [METRICS | scrape for scrape in scrapes]
        self.requests, self.tokens, self.asked = asked, 0, []

    def get(self, path):
        answer = self.answers[path]
        return answer() if callable(answer) else answer

    def post(self, path, body):
        self.asked.append(path)
        self.requests += 1
        answer = self.answers[path]
        return answer(body) if callable(answer) else answer

    def metrics(self):
        return Metrics(exposition(self.scrapes.pop(0) if len(self.scrapes) > 1 else self.scrapes[0]))


def subject(answers=None, scrapes=({},), *, execution=None, speculation=None, before=None, asked=1, **expected):
    server = Fake(answers, scrapes, asked)
    server.answers["/v1/capacity"]["execution"] |= execution or {}
    server.answers["/health"]["speculation"] |= speculation or {}
    found = Subject(server, Wanted(**{"version": "1.0", "watch_seconds": 0.0} | expected), began=0.0)
    found.before = Metrics(exposition(METRICS | (before or {})))
    return found


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch):
    """For counters that settle, and for an idle engine."""
    monkeypatch.setattr(after, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(facts, "IDLE_SECONDS", 0.0)


def refusing(text):
    def answer(*_):
        raise Refused(text)

    return answer


def test_a_relay_is_told_from_the_server_itself():
    """The shipped ones keep /metrics to the machine; another one may send each look to another server."""
    direct = subject({"/ready": {"ready": True}})
    assert facts.answers(direct).passed and direct.before.has("engine_up")
    behind = subject({"/ready": {"ready": True}})
    behind.server.metrics = refusing("/metrics: 403 Forbidden")
    with pytest.raises(CannotRun, match=r"/metrics: 403 Forbidden: gates want the server itself, not a relay"):
        facts.answers(behind)
    several = subject({"/ready": {"ready": True}}, [{"engine_ready_timestamp_seconds": when} for when in (1, 2, 1, 2)])
    with pytest.raises(CannotRun, match=r"several servers answer in turn: gates want the server itself"):
        facts.answers(several)


@pytest.mark.parametrize(("look", "path"), [(after.metrics, "metrics"), (facts.graphs, "graphs")])
def test_a_fresh_server_is_asked_before_its_traces_are_looked_at(look, path):
    """`--only metrics` of a server that nobody has asked yet."""
    moved = {
        "generation_tokens_total": 24,
        'request_finished_total{finish_reason="stop"}': 1,
        "spec_decode_num_draft_tokens_total": 18,
    }
    fresh = subject(scrapes=[moved], asked=0)

    def complete(body):
        fresh.server.tokens += body["max_tokens"]
        return {"usage": {"completion_tokens": body["max_tokens"]}}

    fresh.server.answers[requests.COMPLETIONS] = complete
    assert look(fresh).passed and fresh.server.asked == [requests.COMPLETIONS]
    look(fresh)
    assert fresh.server.asked == [requests.COMPLETIONS], "once is enough"


@pytest.mark.parametrize("verdict", ["ok", "failed", "untested"])
def test_trunk(verdict):
    check = {"verdict": verdict, "top1": 0.02, "reason": "NaN or infinite values in lm_head.weight"}
    found = facts.trunk_text(subject({"/health": {"trunk_check": check, "speculation": {}}}))
    assert found.passed == (verdict == "ok") and "2% of a known text" in found.came and "NaN" in found.came
    with pytest.raises(CannotRun, match="not tested"):
        facts.trunk_text(subject())


@pytest.mark.parametrize("recorded", [None, 0.0, 0.02])
def test_a_model_that_knows_no_answer_has_not_passed(monkeypatch, recorded):
    monkeypatch.setattr(quality.harness, "is_installed", lambda: False)
    items = quality.quality.items()
    for right, passed in ((0, False), (1, True)):
        texts = [item.answer if number < right else "!!!!" for number, item in enumerate(items)]
        monkeypatch.setattr(quality.quality, "answers", lambda *_, texts=texts: texts)
        found = quality.look(subject(score=recorded))
        assert found.passed == passed and f"score {right / len(items):.2f}" in found.came


def test_version():
    assert facts.version(subject({"/version": {"version": "1.0"}})).passed
    assert not facts.version(subject({"/version": {"version": "0.9"}})).passed


@pytest.mark.parametrize(
    ("execution", "speculation", "passed", "words"),
    [
        ({}, {}, True, "15 of 15"),
        ({"head_weights": [14, 15]}, {}, False, "14 of 15"),
        (
            {"head_weights": [0, 15]},
            {"num_speculative_tokens": 0, "disabled_reason": "1 of its 15 weights are missing, first mtp.fc"},
            False,
            "mtp.fc",
        ),
        ({"head_weights": [0, 0]}, {}, False, "0 of 0"),
        ({}, {"num_speculative_tokens": 0, "disabled_reason": "num_speculative_tokens is 0"}, True, "15 loaded"),
        ({"head_weights": [0, 0]}, {"draft_head": "look-up of 5 to 5 tokens"}, True, "look-up"),
    ],
)
def test_head_weights(execution, speculation, passed, words):
    found = facts.head_weights(subject(execution=execution, speculation=speculation))
    assert found.passed == passed and words in found.came


def test_no_head_is_fine_only_where_none_was_asked_for():
    none = {"num_speculative_tokens": 0, "disabled_reason": "the checkpoint has no MTP head"}
    assert facts.head_weights(subject(speculation=none, execution={"head_weights": [0, 15]}, k=0)).passed
    assert not facts.head_weights(subject(speculation=none, execution={"head_weights": [0, 15]})).passed


@pytest.mark.parametrize("verdict", ["ok", "weak", "dead", "untested"])
def test_head_rank(verdict):
    found = facts.head_rank(subject(speculation={"head_check": {"verdict": verdict, "reason": "its norms"}}))
    assert found.passed == (verdict == "ok") and "its norms" in found.came


def test_a_head_that_was_not_tested_has_not_passed():
    with pytest.raises(CannotRun, match="not tested"):
        facts.head_rank(subject(speculation={"head_check": None}))


@pytest.mark.parametrize(
    ("execution", "expected", "passed"),
    [
        ({}, {}, True),
        ({"kv_dtype": "float8_e4m3fn"}, {}, False),
        ({"kv_dtype": "float8_e4m3fn"}, {"kv_dtype": "float8_e4m3fn"}, True),
        ({"state_dtype": "bfloat16"}, {}, False),
    ],
)
def test_kv_dtype(execution, expected, passed):
    assert facts.kv_dtype(subject(execution=execution, **expected)).passed == passed


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], None),
        (["--", "--kv-cache-dtype", "auto"], None),
        (["--", "--dtype", "auto", "--kv-cache-dtype", "fp8"], "float8_e4m3fn"),
        (["--kv-dtype", "fp8"], "float8_e4m3fn"),
        (["--kv-dtype", "float32", "--", "--kv-cache-dtype", "bfloat16"], "float32"),
    ],
)
def test_the_kv_dtype_that_was_asked_for(given, wanted):
    assert command.expected_of(command.parse(["/model", *given])).kv_dtype == wanted


@pytest.mark.parametrize(
    ("routes", "passed", "words"),
    [
        (None, True, "3 layers"),
        ({PACKED: ["layers.0", "layers.1", "lm_head", "head"], FALLBACK: ["layers.2"]}, False, "in layers.2"),
        ({PACKED: ["layers.0", "layers.1", "layers.2", "lm_head"], FALLBACK: ["head", "layers.2"]}, False, "head"),
        ({PACKED: ["layers.0", "layers.2", "lm_head", "head"]}, False, "in layers.1"),
        ({"aten::matmul float32": ["layers.0", "layers.1", "layers.2", "lm_head", "head"]}, False, "layers.0"),
        ({}, False, "nothing was seen"),
    ],
)
def test_kernel_routes(routes, passed, words):
    found = facts.routes(subject(execution={} if routes is None else {"routes": routes}))
    assert found.passed == passed and words in found.came


def test_slow_ways_fail():
    assert facts.slow(subject()).passed
    found = facts.slow(subject(execution={"slow": ["prompts run by plain torch: fla-core is missing"]}))
    assert not found.passed and "fla-core is missing" in found.came


def test_a_device_without_a_known_route_must_have_one_in_every_layer():
    layers = ["layers.0", "layers.1", "layers.2", "lm_head", "head"]
    for routes, passed in (({"pilotfish::linear bfloat16": layers}, True), ({FALLBACK: layers[1:]}, False)):
        found = subject(execution={"routes": routes})
        found.server.answers["/v1/capacity"]["device"] = "cuda:0"
        assert facts.routes(found).passed == passed


@pytest.mark.parametrize(
    ("num_graphs", "eager", "replayed", "passed"),
    [(0, 12, 0, True), (0, 0, 0, False), (8, 0, 40, True), (8, 1, 40, False), (8, 0, 0, False), (0, 12, 3, False)],
)
def test_graphs(num_graphs, eager, replayed, passed):
    scrape = {'rounds_total{path="eager"}': eager, 'rounds_total{path="graph"}': replayed}
    found = facts.graphs(subject(scrapes=[scrape], execution={"num_graphs": num_graphs}))
    assert found.passed == passed
    assert "none captured" in found.came or num_graphs


def test_a_gpu_without_graphs_is_not_fit_for_traffic():
    found = subject(scrapes=[{'rounds_total{path="eager"}': 12}], execution={"num_graphs": 0})
    assert facts.graphs(found).passed
    found.server.answers["/v1/capacity"]["device"] = "cuda:0"
    assert not facts.graphs(found).passed


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_compiles_while_serving(count):
    found = facts.compiled(subject(scrapes=[{"kernels_compiled_total": count}]))
    assert found.passed == (count == 0) and f"{count} compiled" in found.came


def test_a_server_that_does_not_count_compilations_has_not_passed():
    found = subject()
    found.server.scrapes = [{"engine_up": 1}]
    with pytest.raises(CannotRun, match="kernels_compiled_total"):
        facts.compiled(found)


@pytest.mark.parametrize(("used", "passed"), [(3 * GIB, True), (6 * GIB, False), (GIB // 2, False)])
def test_memory(used, passed):
    assert facts.memory(subject(scrapes=[{"memory_used_bytes": used}])).passed == passed


def test_memory_that_was_not_measured_has_not_passed():
    with pytest.raises(CannotRun):
        facts.memory(subject(scrapes=[{"memory_used_bytes": 0}]))


# -- requests


def positions(*counts):
    name = "spec_decode_num_draft_tokens_per_pos_total"
    return {f'{name}{{position="{i}"}}': count for i, count in enumerate(counts)}


@pytest.mark.parametrize(
    ("growth", "asked", "served", "passed"),
    [
        ((5, 5, 4), 3, 3, True),
        ((5, 5, 4), None, 3, True),
        ((5, 5, 4), 5, 3, False),
        ((5, 0, 0), 3, 3, False),
        ((0, 0, 0), None, 3, False),
        ((), 0, 0, True),
        ((), 3, 0, False),
        ((), None, 0, False),
    ],
)
def test_k_served(growth, asked, served, passed):
    old = positions(*(7 for _ in growth))
    new = positions(*(7 + n for n in growth))
    reason = None if served else "the MTP head is incomplete"
    found = requests.k_served(
        subject(
            {requests.COMPLETIONS: {}},
            [old, new],
            speculation={"num_speculative_tokens": served, "disabled_reason": reason},
            k=asked,
        )
    )
    assert found.passed == passed and f"k = {served}" in found.came


def bytes_of(body):
    return {"tokens": list(body["prompt"].encode())}


def test_tokenizer():
    def text_of(body):
        return {"prompt": bytes(body["tokens"]).decode()}

    assert requests.tokenizer(subject({"/tokenize": bytes_of, "/detokenize": text_of})).passed
    stripped = {"/tokenize": bytes_of, "/detokenize": lambda body: {"prompt": text_of(body)["prompt"].strip()}}
    found = requests.tokenizer(subject(stripped))
    assert not found.passed and "came back as" in found.came


def chatml(messages, opening, drop=None, roles=True):
    parts = [
        f"<|{m['role'] if roles else 'x'}|>{m['content']}\n" for m in messages if drop is None or m["role"] != drop
    ]
    return "".join(parts) + (opening or "")


@pytest.mark.parametrize(
    ("template", "passed", "words"),
    [
        ({}, True, "4 messages"),
        ({"drop": "system"}, False, "0 times"),
        ({"roles": False}, False, "'system'"),
        ({"opening": ""}, False, "opening"),
        ({"twice": True}, False, "2 times"),
        ({"extra": 1}, False, "tokens"),
    ],
)
def test_template(template, passed, words):
    options = dict(template)
    twice, extra = options.pop("twice", False), options.pop("extra", 0)
    opening = options.pop("opening", "<|assistant|>")

    def tokenize(body):
        messages = body["messages"] * (1 + twice)
        text = chatml(messages, opening if body.get("add_generation_prompt", True) else "", **options)
        return {"tokens": list(text.encode()), "count": len(text.encode())}

    def chat(body):
        return {"usage": {"prompt_tokens": tokenize(body)["count"] + extra}}

    def text_of(body):
        return {"prompt": bytes(body["tokens"]).decode()}

    found = requests.template(subject({"/tokenize": tokenize, "/detokenize": text_of, requests.CHAT: chat}))
    assert found.passed == passed and words in found.came


def chunk(finish=None, **delta):
    return {"choices": [{"delta": delta, "finish_reason": finish}]}


OPENING, END = chunk(role="assistant"), chunk("stop")
USAGE = {"choices": [], "usage": {"completion_tokens": 2}}


@pytest.mark.parametrize(
    ("events", "passed"),
    [
        ([OPENING, chunk(content="Hi "), chunk(content="you"), END, USAGE, None], True),
        ([OPENING, chunk(content="Hi "), chunk(content="you"), END, USAGE], False),
        ([OPENING, chunk(content="Hi you"), END, None], False),
        ([OPENING, chunk(content="Hi "), END, USAGE, None], False),
        ([chunk(content="Hi you"), END, USAGE, None], False),
        ([OPENING, chunk(content="Hi you"), USAGE, None], False),
        ([OPENING, chunk(content="Hi you"), chunk("length"), USAGE, None], False),
    ],
)
def test_streamed_chat(events, passed):
    whole = {"choices": [{"message": {"content": "Hi you"}, "finish_reason": "stop"}]}
    found = subject({requests.CHAT: whole})
    found.server.stream = lambda path, body: iter(events)
    assert requests.streamed_chat(found).passed == passed


@pytest.mark.parametrize(
    ("calls", "finish", "passed"),
    [
        ([("get_weather", '{"city": "Paris"}')], "tool_calls", True),
        ([("get_weather", '{"city": "Paris"}')], "length", False),
        ([("get_weather", '{"city": 1}')], "tool_calls", False),
        ([("get_weather", '{"city": "Par')], "tool_calls", False),
        ([("other", '{"city": "Paris"}')], "tool_calls", False),
        ([], "tool_calls", False),
        (None, "stop", False),
    ],
)
def test_tool_call(calls, finish, passed):
    shaped = calls and [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    answer = {"choices": [{"message": {"tool_calls": shaped}, "finish_reason": finish}]}
    assert requests.tool_call(subject({requests.CHAT: answer})).passed == passed


@pytest.mark.parametrize(
    ("text", "finish", "passed"),
    [
        ('{"city": "Rome", "count": 3}', "stop", True),
        ('{"city": "Rome", "count": 3}', "length", False),
        ('{"city": "Rome"}', "stop", False),
        ('{"city": "Rome", "count": 10}', "stop", False),
        ('{"city": "Paris", "count": 1}', "stop", False),
        ('{"city": "Rome", "count": true}', "stop", False),
        ("Rome, three", "stop", False),
        (None, "stop", False),
    ],
)
def test_json_schema(text, finish, passed):
    answer = {"choices": [{"message": {"content": text}, "finish_reason": finish}]}
    assert requests.json_schema(subject({requests.CHAT: answer})).passed == passed


def exact_server(change=None, drafted=9):
    """Tokens follow from prompt and mode, as they should; `change` may spoil them."""

    def complete(body):
        ids = [len(body["prompt"]), int(10 * body["temperature"]), 3 + len(body.get("bad_words", ()))]
        plain = body.get("speculation") == {"k": 0}
        if change:
            ids = change(body, ids, plain)
        return {
            "choices": [{"token_ids": ids, "text": "down by the old stone quay"}],
            "metrics": {"speculative_decoding": {"drafted": 0 if plain else drafted}},
        }

    return subject({requests.COMPLETIONS: complete})


def test_exactness():
    found = requests.exactness(exact_server())
    assert found.passed and "the same 48 ids" in found.came and "bad_words changed 8 texts" in found.came


def test_bad_words_that_do_not_see_drafts_are_seen():
    def blind(body, ids, plain):
        return [*ids[:2], 3] if "bad_words" in body and not plain else ids

    found = requests.exactness(exact_server(blind))
    assert not found.passed and "without 'the old', " in found.came and "token 2" in found.came


@pytest.mark.parametrize("text", ["\u542c\u9528" * 16, "\U00013000" * 9, "\ufffd" * 32, "x" * 90])
def test_words_of_a_text_without_spaces_may_be_forbidden(text):
    """No tokenizer of bytes makes more tokens of a text than it has bytes."""
    words = requests.bad_words(text)
    assert words and all(len(f" {word}".encode()) <= MAX_BAD_LENGTH and word in text for word in words)


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_one_token_that_depends_on_k_is_seen(mode):
    def spoil(body, ids, plain):
        wrong = not plain and (body["temperature"] > 0) == (mode == "sampled")
        return [*ids[:2], 4] if wrong else ids

    found = requests.exactness(exact_server(spoil))
    assert not found.passed and found.came.startswith(mode) and "token 2" in found.came


def test_a_shorter_answer_is_another_answer():
    found = requests.exactness(exact_server(lambda body, ids, plain: ids if plain else ids[:2]))
    assert not found.passed and "the end" in found.came


def test_a_comparison_without_drafts_says_nothing():
    assert not requests.exactness(exact_server(drafted=0)).passed


# -- after


@pytest.mark.parametrize(
    ("scrape", "passed"),
    [
        ({}, True),
        ({"generation_tokens_total": 99}, False),
        ({'request_finished_total{finish_reason="stop"}': 4}, False),
        ({"spec_decode_num_draft_tokens_total": 0}, False),
        ({"nan_requests_total": 1}, False),
        ({"exactness_mismatched_requests_total": 1}, False),
        ({"engine_up": 0}, False),
    ],
)
def test_metrics(scrape, passed):
    moved = {
        "generation_tokens_total": 100,
        'request_finished_total{finish_reason="stop"}': 5,
        "spec_decode_num_draft_tokens_total": 60,
    }
    found = subject(scrapes=[moved | scrape])
    found.server.tokens, found.server.requests = 100, 5
    assert after.metrics(found).passed == passed


@pytest.mark.parametrize(
    ("scrape", "ready", "passed"),
    [
        ({}, True, True),
        ({"engine_restarts_total": 1}, True, False),
        ({"engine_ready_timestamp_seconds": 1007}, True, False),
        ({}, False, False),
    ],
)
def test_stays_up(scrape, ready, passed):
    assert after.stays_up(subject({"/ready": {"ready": ready}, requests.COMPLETIONS: {}}, [scrape])).passed == passed


# -- the audit, the report, the command


@pytest.mark.parametrize(
    ("lines", "status", "passed"),
    [
        ([{"findings": [], "num_rows": 7}, {"verdict": "pass", "digest": "a1b2"}], 0, True),
        (
            [{"findings": [{"run": "k = 1", "request": "0-greedy", "position": 9, "tensor": "logits"}], "num_rows": 7}],
            1,
            False,
        ),
        ([], 0, False),
    ],
)
def test_full_audit(monkeypatch, lines, status, passed):
    given = []

    def run(command, **_):
        given.extend(command)
        return subprocess.CompletedProcess(command, status, "\n".join(map(json.dumps, lines)))

    monkeypatch.setattr(subprocess, "run", run)
    found = audit.full("m", ["--dtype", "float32", "--port", "1", "--kv-cache-dtype", "fp8"], 3, 16)
    assert found.passed == passed
    wanted = ["--max-depth", "3", "--max-batch", "4", "--dtype", "float32", "--kv-cache-dtype", "fp8"]
    assert given[given.index("--max-depth") :] == wanted
    assert passed or not lines or "position 9, logits" in found.came


def test_an_audit_that_could_not_run_has_not_passed(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 2, ""))
    with pytest.raises(CannotRun, match="status 2"):
        audit.full("m", [], 3, 4)


@pytest.mark.parametrize(
    "error", [CannotRun("no head"), Refused("/x: 404"), Unreachable("gone"), KeyError("usage"), TypeError("None")]
)
def test_a_gate_that_cannot_run_has_not_passed(error, capsys):
    def look():
        raise error

    report = command.GateReport("http://x")
    result = report.run("some gate", look)
    assert not result.passed and "could not run" in result.came and not report.passed
    assert capsys.readouterr().out.startswith("FAIL  some gate")


def test_a_report_says_what_was_wanted_where_it_was_not_met(capsys):
    report = command.GateReport("http://x", wanted=["answers", "version"])
    assert not report.passed, "nothing looked at is nothing passed"
    report.run("answers", lambda: Found(True, "a", "b"))
    assert report.passed
    report.run("version", lambda: Found(False, "1.0", "0.9"))
    whole = json.loads(report.as_json())
    assert whole["url"] == "http://x" and whole["passed"] is False
    assert [g["name"] for g in whole["gates"]] == ["answers", "version"]
    assert whole["gates"][1].keys() == {"name", "passed", "wanted", "came", "seconds"}
    assert "chat template" in whole["skipped"] and "full audit" not in whole["skipped"]
    said = capsys.readouterr().out
    assert "PASS  answers" in said and "came:   0.9" in said and "wanted: 1.0" in said


def test_nobody_there_fails_every_gate_by_name(tmp_path, capsys):
    file = tmp_path / "gates.json"
    assert command.main(["http://127.0.0.1:9", "--json", str(file)]) == 1
    report = json.loads(file.read_text())
    assert [g["name"] for g in report["gates"]] == [n for n in command.NAMES if n != command.FULL_AUDIT]
    assert not any(g["passed"] for g in report["gates"])
    assert "21 of 21 gates FAILED: answers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "URL-or-MODEL"),
        (["http://x", "--skip", "tools"], "want some of answers"),
        (["http://x", "--", "--max-num-seqs", "2"], "want a MODEL"),
        (["http://x", "--port", "8000"], "want a MODEL"),
    ],
)
def test_wrong_flags_are_explained(args, words, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(args)
    assert ended.value.code == 2 and words in capsys.readouterr().err
