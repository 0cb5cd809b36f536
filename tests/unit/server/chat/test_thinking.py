"""One rule for what a request says of thinking, whichever API and field it comes by."""

import pytest

from pilotfish.server.chat.thinking import Wish, template_values
from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes

SWITCH, EFFORT = {"enable_thinking"}, {"reasoning_effort"}


def values(wish, variables=SWITCH, given=(), counted=None):
    notes = FieldNotes(on_unused=(counted if counted is not None else []).append)
    return template_values(dict(given), Wish(**wish), variables, notes)


@pytest.mark.parametrize(
    ("wish", "on"),
    [
        ({}, None),
        ({"default": False}, False),
        ({"effort": "none"}, False),
        ({"effort": "minimal"}, False),
        ({"effort": "low", "default": False}, True),
        ({"effort": "max"}, True),
        ({"effort": "none", "budget": 5}, True),
        ({"effort": "high", "budget": 0}, True),
        ({"budget": 5, "on": False}, False),
        ({"effort": "none", "on": True}, True),
        ({"effort": "high", "on": False}, False),
    ],
)
def test_what_is_nearer_to_the_template_goes_first(wish, on):
    assert values(wish) == ({} if on is None else {"enable_thinking": on})
    for said in (True, False):
        assert values(wish, given={"enable_thinking": said}) == {"enable_thinking": said}


def test_an_effort_is_passed_on_where_the_template_reads_it():
    assert values({"effort": "low"}, EFFORT) == {"reasoning_effort": "low"}
    assert values({"effort": "none"}, SWITCH | EFFORT) == {"reasoning_effort": "none", "enable_thinking": False}
    assert values({"effort": "low"}, EFFORT, {"reasoning_effort": "high"}) == {"reasoning_effort": "high"}
    assert values({"effort": "immense"}, EFFORT) == {"reasoning_effort": "immense"}
    with pytest.raises(BadRequest) as caught:
        values({"effort": "immense"})
    assert caught.value.param == "reasoning_effort"


def test_an_effort_that_changes_nothing_is_counted():
    for wish, variables, uses in (({}, (), 1), ({}, SWITCH, 0), ({}, EFFORT, 0), ({"on": True}, SWITCH, 1)):
        counted = []
        values({"effort": "high", **wish}, frozenset(variables), counted=counted)
        assert counted == ["effort"] * uses
