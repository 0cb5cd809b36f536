"""The shipped questions are sound and scored by their rules; lm-eval is given the same ones, and says the same."""

import json
import re
import string

import pytest

from pilotfish.deploy.evaluate import command, harness, quality
from pilotfish.deploy.evaluate.quality import Item

ITEMS = quality.items()
CHOICES = [item for item in ITEMS if item.kind == "choice"]
COMPLETIONS = [item for item in ITEMS if item.kind == "completion"]


def test_half_are_choices_and_half_completions_all_different():
    assert len(CHOICES) == len(COMPLETIONS) == 25
    assert len({item.prompt for item in ITEMS}) == 50


def test_choices_have_four_different_options_and_no_favourite_letter():
    for item in CHOICES:
        question = item.prompt.split("Question: ")[-1]
        options = re.findall(r"^([A-D])\. (.+)$", question, re.M)
        assert [letter for letter, _ in options] == list("ABCD") and len({text for _, text in options}) == 4
        assert item.prompt.endswith("\nAnswer:")
    most = max(sum(item.answer == letter for item in CHOICES) for letter in "ABCD")
    assert most <= 7, "one letter said always must not be worth much"


def test_prompts_end_where_a_word_begins():
    """A blank at the end would be cut from the first word's token."""
    assert all(item.prompt[-1] not in string.whitespace for item in ITEMS)


@pytest.mark.parametrize("item", ITEMS, ids=range(50))
def test_the_right_answer_is_right_and_others_are_not(item):
    assert item.is_right(f" {item.answer}") and item.is_right(f" {item.answer} and more")
    assert not item.is_right("") and not item.is_right(" Zebra") and not item.is_right(f" x{item.answer}")


def test_a_letter_must_stand_alone():
    item = Item("choice", "..", "A")
    assert item.is_right(" A. True") and item.is_right(" (A)")
    assert not item.is_right(" 'ABC'") and not item.is_right(" B or A")


class Echo:
    """Says the right answer to every second question."""

    def __init__(self):
        self.bodies = []

    def post(self, path, body):
        self.bodies.append(body)
        item = next(item for item in ITEMS if item.prompt == body["prompt"])
        return {"choices": [{"text": f" {item.answer}" if ITEMS.index(item) % 2 else " nothing"}]}


def test_answers_come_in_order_and_are_scored():
    server = Echo()
    texts = quality.answers(server, ITEMS, k=0)
    assert [text != " nothing" for text in texts] == [bool(i % 2) for i in range(50)]
    assert quality.score(ITEMS, texts) == 0.5
    assert all(b["speculation"] == {"k": 0} and b["temperature"] == 0 and b["stop"] == ["\n"] for b in server.bodies)
    other = Echo()
    quality.answers(other, ITEMS)
    assert not any("speculation" in body for body in other.bodies)


def test_lm_eval_is_given_the_same_rules():
    for name, kind in harness.OWN_TASKS.items():
        task = harness.own_task(name)
        assert task["filter_list"][0]["filter"][0]["regex_pattern"] == quality.RULES[kind].pattern
        assert task["dataset_kwargs"]["data_files"]["test"] == str(quality.FILE)
        assert task["generation_kwargs"] == {"until": ["\n"], "max_gen_toks": quality.MAX_TOKENS, "temperature": 0}


def results():
    def half(value, texts):
        return {"exact_match,first": value, "exact_match_stderr,first": "N/A", "sample_len": len(texts), "alias": "x"}

    texts = {name: [f"{name} {i}" for i in range(25)] for name in harness.OWN_TASKS}
    samples = {name: [{"doc_id": i, "resps": [[t]]} for i, t in enumerate(ts)][::-1] for name, ts in texts.items()}
    values = dict(zip(texts, (0.2, 0.6), strict=True))
    return {"results": {n: half(values[n], ts) for n, ts in texts.items()}, "samples": samples}, [
        t for ts in texts.values() for t in ts
    ]


def test_lm_evals_results_are_read():
    found, texts = results()
    assert harness.own_texts(found) == texts
    rows = harness.scores(found)
    assert [row[0] for row in rows] == [*harness.OWN_TASKS, harness.OWN_GROUP]
    assert rows[-1][1:] == ("exact_match", pytest.approx(0.4), 50)
    assert command.table(rows).splitlines()[-1].split() == ["pilotfish_quality", "exact_match", "0.4000", "50"]


def test_the_command_by_our_own_client(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "Server", lambda *_: Echo())
    file = tmp_path / "scores.json"
    assert command.main(["http://x", "--client", "own", "--limit", "10", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    score = {"task": "pilotfish_quality", "metric": "exact_match", "value": 0.5, "questions": 10}
    assert report["scores"] == [score] and len(report["results"]["answers"]) == 10
    assert "0.5000" in capsys.readouterr().out


def test_without_lm_eval_the_way_to_it_is_named(monkeypatch, capsys):
    monkeypatch.setattr(harness, "is_installed", lambda: False)
    assert command.main(["http://x"]) == 2 and "pilotfish[eval]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["http://x", "--", "--port", "1"], "want a MODEL"),
        (["http://x", "--client", "own", "--tasks", "gsm8k"], "pilotfish_quality alone"),
    ],
)
def test_wrong_flags_are_explained(args, words, capsys):
    with pytest.raises(SystemExit):
        command.main(args)
    assert words in capsys.readouterr().err
