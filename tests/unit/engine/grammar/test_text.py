"""Grammars: masks per row of a window, and text under a grammar that is the same for every k."""

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pilotfish.engine.errors import RequestError
from pilotfish.engine.grammar.library import GrammarLibrary
from pilotfish.engine.link.messages import Grammar, SamplingParams, Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.start import make_core

MODEL = Path(__file__).resolve().parents[4] / "demo" / "model"
EOS = (8179,)
VOCAB = 8192
NUM_WORDS = VOCAB // 32
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def library():
    library = GrammarLibrary(MODEL / "tokenizer.json", VOCAB)
    yield library
    library.close()


def rows_of(constraint, drafts):
    bits = np.zeros((len(drafts) + 1, VOCAB // 32), dtype=np.int32)
    constraint.mask_rows(drafts, bits)
    return np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little").astype(bool)


class TestMasks:
    def test_each_row_allows_what_may_follow_the_drafts_before_it(self, library, tokenizer):
        a, b, c = (tokenizer.token_to_id(letter) for letter in "abc")
        constraint = library.constraint(Grammar(kind="regex", source="ab*c"), EOS)
        rows = rows_of(constraint, [a, b, c])
        assert rows[0][a] and not rows[0][b] and not rows[0][EOS[0]]
        assert rows[1][b] and rows[1][c] and not rows[1][a]
        assert rows[2][b] and rows[2][c]
        # complete: nothing but the end may follow
        assert rows[3].nonzero()[0].tolist() == list(EOS)

    def test_masks_of_rejected_drafts_leave_no_trace(self, library, tokenizer):
        """A string in an object was drafted where one in a list came: what may end it is another token."""

        def ids(text):
            return tokenizer.encode(text, add_special_tokens=False).ids

        drafted, alone = (library.constraint(Grammar(kind="json_object"), EOS) for _ in range(2))
        for constraint in (drafted, alone):
            constraint.advance(ids('{"required'))
        rows_of(drafted, ids('": {"type'))
        for constraint in (drafted, alone):
            constraint.advance(ids('": ["'))
            assert constraint.error is None
        want = rows_of(alone, [])[0]
        assert want[tokenizer.token_to_id('"],')]
        assert (rows_of(drafted, [])[0] == want).all()

    def test_drafts_leave_no_trace(self, library, tokenizer):
        a, b, c = (tokenizer.token_to_id(letter) for letter in "abc")
        constraint = library.constraint(Grammar(kind="regex", source="ab*c"), EOS)
        before = rows_of(constraint, [])
        for drafts in ([a, b, c], [c, a, b], [a, c, EOS[0]], [a, a, a]):
            rows_of(constraint, drafts)
        assert (rows_of(constraint, []) == before).all()
        constraint.advance([a, b])
        assert rows_of(constraint, [])[0][c]

    def test_rows_after_a_forbidden_draft_allow_everything(self, library, tokenizer):
        a, c = tokenizer.token_to_id("a"), tokenizer.token_to_id("c")
        rows = rows_of(library.constraint(Grammar(kind="regex", source="ab"), EOS), [a, c, c])
        assert not rows[1][c]
        assert rows[2].all() and rows[3].all()

    def test_a_grammar_after_a_token_waits_for_it_inside_a_window_too(self, library, tokenizer):
        think, a = tokenizer.token_to_id("</think>"), tokenizer.token_to_id("a")
        constraint = library.constraint(Grammar(kind="regex", source="a", after_token_id=think), EOS)
        rows = rows_of(constraint, [5, think, a])
        assert rows[0].all() and rows[1].all()
        assert rows[2][a] and not rows[2][5]
        constraint.advance([5, think])
        assert not rows_of(constraint, [])[0][5]

    def test_what_must_come_is_known_until_something_may(self, library, tokenizer):
        constraint = library.constraint(Grammar(kind="regex", source='\\{"customer number": [0-9]+\\}'), EOS)
        forced = constraint.forced(20, NUM_WORDS)
        assert tokenizer.decode(forced) == '{"customer number": '
        constraint.advance(forced)
        assert constraint.forced(20, NUM_WORDS) == []
        constraint.advance([tokenizer.token_to_id("7")])
        assert constraint.forced(20, NUM_WORDS) == []

    def test_what_must_come_is_looked_for_as_far_as_it_is_asked_for_and_others_run_meanwhile(self, library, tokenizer):
        source = 'start: /[ab]{40}/ x{40}\nx: y{100}\ny: "hello world hello world hello world hello world hello world"'
        constraint = library.constraint(Grammar(kind="grammar", source=source), EOS)
        constraint.advance(tokenizer.encode("ab" * 20).ids)
        assert constraint.error is None
        turns, ended = [], threading.Event()

        def other():
            while not ended.wait(0.001):
                turns.append(None)

        thread = threading.Thread(target=other)
        thread.start()
        before = len(turns)
        forced = constraint.forced(20, NUM_WORDS)
        during = len(turns) - before
        ended.set()
        thread.join()
        # the first mask has to write all of it out
        assert forced == [] and during > 3

    def test_no_more_is_forced_than_asked_for(self, library, tokenizer):
        constraint = library.constraint(Grammar(kind="regex", source="all of this long text"), EOS)
        assert tokenizer.decode(constraint.forced(2, NUM_WORDS)) == "all of"
        assert constraint.forced(1, NUM_WORDS) == []

    def test_nothing_is_forced_before_a_grammar_begins_or_after_it_ended(self, library, tokenizer):
        think = tokenizer.token_to_id("</think>")
        constraint = library.constraint(Grammar(kind="regex", source="all of this text", after_token_id=think), EOS)
        assert constraint.forced(20, NUM_WORDS) == []
        constraint.advance([think])
        forced = constraint.forced(20, NUM_WORDS)
        assert tokenizer.decode(forced) == "all of this text"
        constraint.advance([*forced, EOS[0]])
        assert constraint.forced(20, NUM_WORDS) == []

    def test_a_forbidden_commit_is_an_error_and_not_a_crash(self, library, tokenizer):
        constraint = library.constraint(Grammar(kind="regex", source="ab"), EOS)
        constraint.advance([tokenizer.token_to_id("c")])
        assert constraint.error


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        (Grammar(kind="json_schema", source="{not json"), "json_schema"),
        (Grammar(kind="json_schema", source='{"type": "nonsense"}'), "json_schema"),
        (Grammar(kind="regex", source="(unclosed"), "regex"),
        (Grammar(kind="grammar", source="start: missing_rule"), "grammar"),
        (Grammar(kind="grammar", source="root ::= root root | nowhere"), "grammar"),
        (Grammar(kind="grammar", source=""), "grammar"),
        (Grammar(kind="choice", source="[]"), "choice"),
    ],
)
def test_a_malformed_grammar_is_refused_by_kind(library, grammar, named):
    with pytest.raises(RequestError, match=named):
        library.constraint(grammar, EOS)


def run(depth: int, batch: int, requests: list[Submit]) -> dict[str, list[int]]:
    core: EngineLoop = make_core(
        EngineOptions(model=str(MODEL), num_speculative_tokens=depth, max_num_seqs=batch, max_model_len=1024)
    )
    for request in requests:
        core.submit(request)
    texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
    accepted = 0
    while core.has_work():
        report = core.step()
        # none while it waits for grammars
        for output in report.outputs if report is not None else ():
            assert output.error is None, output.error
            texts[output.request_id] += output.token_ids
            accepted += output.num_accepted
    core.scheduler.check()
    core.grammars.close()
    assert depth == 0 or accepted > 0
    return texts


@pytest.fixture(scope="module")
def requests(tokenizer):
    prompt = tokenizer.encode("<|im_start|>user\nDescribe a person.<|im_end|>\n<|im_start|>assistant\n").ids
    base = {"eos_token_ids": EOS, "max_tokens": 48, "seed": 5}
    grammars = {
        "schema": Grammar(kind="json_schema", source=json.dumps(SCHEMA)),
        "regex": Grammar(kind="regex", source=r"[a-z]{3,8}(, [a-z]{3,8}){2}\."),
        "choice": Grammar(kind="choice", source=json.dumps(["yes, certainly", "no, never", "perhaps"])),
        "free": None,
    }
    modes = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 0.2}}
    return [
        Submit(
            request_id=f"{name}-{mode}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(grammar=grammar, **base, **how),
        )
        for name, grammar in grammars.items()
        for mode, how in modes.items()
    ]


@pytest.fixture(scope="module")
def plain(requests):
    return {name: tokens for request in requests for name, tokens in run(0, 1, [request]).items()}


def test_text_matches_its_grammar(plain, tokenizer):
    texts = {name: tokenizer.decode(tokens, skip_special_tokens=True) for name, tokens in plain.items()}
    for mode in ("greedy", "sampled"):
        person = json.loads(texts[f"schema-{mode}"])
        assert isinstance(person["name"], str) and isinstance(person["age"], int) and isinstance(person["ok"], bool)
        assert re.fullmatch(r"[a-z]{3,8}(, [a-z]{3,8}){2}\.", texts[f"regex-{mode}"])
        assert texts[f"choice-{mode}"] in ("yes, certainly", "no, never", "perhaps")


@pytest.mark.parametrize(("depth", "batch"), [(1, 4), (3, 1), (3, 4), (5, 3)])
def test_text_under_a_grammar_does_not_depend_on_k_or_batch(plain, requests, depth, batch):
    assert run(depth, batch, requests) == plain


def test_forced_tokens_as_drafts_save_rounds_and_change_no_text(tokenizer, monkeypatch):
    names = ("customer_identifier", "shipping_address_number", "delivery_days")
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": list(names)}
    prompt = tokenizer.encode("<|im_start|>user\nThe data.<|im_end|>\n<|im_start|>assistant\n").ids
    grammar = Grammar(kind="json_schema", source=json.dumps({**schema, "additionalProperties": False}))
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=80, eos_token_ids=EOS, grammar=grammar)
    core = make_core(EngineOptions(model=str(MODEL), num_speculative_tokens=3, max_num_seqs=1, max_model_len=512))

    def rounds():
        core.submit(Submit(request_id="x", prompt_token_ids=prompt, sampling=params))
        tokens, count = [], 0
        while core.has_work():
            report = core.step()
            for output in report.outputs if report is not None else ():
                tokens += output.token_ids
                count += output.round
        return tokens, count

    forced = rounds()
    monkeypatch.setattr("pilotfish.engine.grammar.constraint.MIN_FORCED", 1000)
    free = rounds()
    assert forced[0] == free[0] and json.loads(tokenizer.decode(forced[0]))
    assert forced[1] < free[1]
    core.grammars.close()
