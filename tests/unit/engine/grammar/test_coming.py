"""Requests whose grammars have not come: outside the queue, counted in it, and in nobody's way."""

import pytest

from pilotfish.engine.link.messages import Grammar
from tests.support.grammars import HeldGrammars
from tests.support.loops import LoopDriver, assert_alone
from tests.unit.engine.grammar.test_steps import Rule

SOME = Grammar(kind="regex", source="x")


@pytest.fixture
def driver():
    driver = LoopDriver(depth=2, agreeing="own", max_num_seqs=2, max_waiting=2)
    driver.loop.grammars = HeldGrammars(Rule)
    return driver


def test_others_go_on_and_what_came_runs(driver):
    asked, plain = driver.ask("asked", 40, grammar=SOME), driver.ask("plain", 21)
    driver.run(60)
    assert plain.finish == "length" and asked.finish is None and driver.loop.has_work()
    assert all(report.stats.num_waiting == 1 for report in driver.reports)
    driver.loop.grammars.come(0)
    driver.run()
    assert asked.finish == "length" and not driver.loop.has_work()
    assert_alone(plain)
    assert_alone(asked)


def test_they_count_in_the_queue(driver):
    waiting = [driver.ask(f"grammar {i}", 40, grammar=SOME) for i in range(3)]
    plain = driver.ask("plain", 21)
    more = [driver.ask("more", 21), driver.ask("more under a grammar", 40, grammar=SOME)]
    driver.step()
    assert [request.last.error_code for request in more] == ["queue_full"] * 2
    assert len(driver.loop.grammars.tickets) == 3
    # all that were taken have room when their grammars come
    for number in (2, 0, 1):
        driver.loop.grammars.come(number)
    driver.run()
    assert [request.finish for request in (*waiting, plain)] == ["length"] * 4


def test_an_abort_drops_the_grammar_and_frees_the_place(driver):
    asked = driver.ask("asked", 40, grammar=SOME)
    driver.loop.abort("asked")
    assert driver.loop.grammars.dropped == driver.loop.grammars.tickets
    driver.step()
    assert asked.finish == "abort" and not driver.loop.has_work()
    driver.loop.abort("asked")
    assert len(driver.loop.grammars.dropped) == 1


def test_what_cannot_be_ended_counts_until_it_has(driver):
    asked = driver.ask("asked", 40, grammar=SOME)
    driver.loop.grammars.is_compiling = True
    driver.loop.abort("asked")
    more = [driver.ask(f"plain {i}", 21) for i in range(4)]
    driver.step()
    assert asked.finish is None and more[-1].last.error_code == "queue_full"
    driver.loop.grammars.come(0)
    driver.run()
    assert asked.finish == "abort" and not asked.tokens and not driver.loop.has_work()


@pytest.mark.parametrize(
    ("fields", "error", "code"),
    [
        ({"error": "regex: too large"}, "regex: too large", "invalid"),
        ({"fault": ZeroDivisionError("x")}, "ZeroDivisionError: x", None),
    ],
)
def test_a_refusal_is_that_request_s(driver, fields, error, code):
    asked, plain = driver.ask("asked", 40, grammar=SOME), driver.ask("plain", 21)
    driver.step()
    driver.loop.grammars.come(0, constraint=None, **fields)
    driver.run()
    assert (asked.finish, asked.last.error, asked.last.error_code) == ("error", error, code)
    assert plain.finish == "length"


def test_its_id_is_in_use(driver):
    driver.ask("asked", 40, grammar=SOME)
    driver.submit("asked", [5], driver.requests["asked"].submit.sampling)
    driver.step()
    assert "in use" in driver.requests["asked"].last.error
