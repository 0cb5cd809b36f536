"""A regular expression out of a checkpoint cannot hold its start up, nor all of them together."""

from __future__ import annotations

import re
import signal
import threading

import pytest

from pilotfish.engine.checkpoint.expressions import Deadline
from pilotfish.engine.checkpoint.rules import Style, matches
from pilotfish.engine.errors import ConfigError

ENDLESS = r"(a+)+b"
NAME = "a" * 60


def test_an_expression_without_an_end_is_refused_by_its_text():
    before = signal.getsignal(signal.SIGVTALRM)
    deadline = Deadline(0.2)
    with pytest.raises(ConfigError, match=r"'\(a\+\)\+b' takes too long on the name a{60}"):
        deadline.match(re.compile(ENDLESS), NAME)
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_the_time_is_for_all_names_together():
    deadline, costly = Deadline(0.5), re.compile(ENDLESS)
    with pytest.raises(ConfigError, match="takes too long"):
        for _ in range(1000):
            deadline.match(costly, "a" * 20)


def test_others_fit_as_they_did():
    deadline = Deadline()
    assert deadline.match(re.compile(r".*gate$"), "mlp.gate") and not deadline.match(re.compile("gate"), "mlp.gate")
    found = []
    thread = threading.Thread(target=lambda: found.append(deadline.match(re.compile("a"), "ab")))
    thread.start()
    thread.join()
    assert found == [True]


def test_a_config_s_patterns_have_the_deadline(monkeypatch):
    monkeypatch.setattr("pilotfish.engine.checkpoint.rules.Deadline", lambda: Deadline(0.2))
    for style, pattern in ((Style.EXACT, f"re:{ENDLESS}"), (Style.PART, ENDLESS)):
        with pytest.raises(ConfigError, match="takes too long"):
            matches([pattern], [NAME], style)
