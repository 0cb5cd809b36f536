"""Stop strings against a brute-force twin that cuts the complete text."""

import itertools
import random

import pytest

from pilotfish.server.text.stops import StopMatcher


def cut_whole(text, stops, include=False, from_end=0):
    """The twin: of all occurrences that end after `from_end`, the first to end, then the longest."""
    found = [
        (start + len(stop), -len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > from_end
    ]
    if not found:
        return text, None
    end, negative_length, stop = min(found)
    return text[: end if include else end + negative_length], stop


def run_pieces(pieces, stops, include=False, num_unarmed=0):
    """Text shown piece by piece; also checks that nothing is shown that must be taken back."""
    matcher = StopMatcher(stops, include=include)
    shown = ""
    for index, piece in enumerate(pieces):
        text, stop = matcher.push(piece, armed=index >= num_unarmed)
        shown += text
        if stop is not None:
            return shown, stop, index
    return shown + matcher.flush(), None, len(pieces)


def all_splits(text):
    for size in range(len(text)):
        for cuts in itertools.combinations(range(1, len(text)), size):
            yield [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("abababac", ["abac"]),
        ("aaabaaab", ["aab", "aaab"]),
        ("xabcabcd", ["abcd", "bc"]),
        ("aaaa", ["aa"]),
        ("aaaab", ["aaaaa", "b"]),
        ("abcdef", ["zz"]),
        ("abcabc", ["c", "bc", "abc"]),
        ("mississi", ["issip", "ssis"]),
        ("a\nb\n\nc", ["\n\n"]),
        ("né€😀€😀x", ["€😀x"]),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_cut_is_the_same_for_every_split(text, stops, include):
    expected = cut_whole(text, stops, include)
    for pieces in all_splits(text):
        assert run_pieces(pieces, stops, include)[:2] == expected, pieces


def test_random_texts_and_splits_match_the_twin():
    for seed in range(3000):
        rng = random.Random(seed)
        letters = "ab" if seed % 2 else "abc"
        text = "".join(rng.choices(letters, k=rng.randrange(1, 25)))
        stops = ["".join(rng.choices(letters, k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4))]
        pieces, at = [], 0
        while at < len(text):
            size = rng.randrange(1, 5)
            pieces.append(text[at : at + size])
            at += size
        unarmed = rng.randrange(0, len(pieces) + 1) if seed % 3 == 0 else 0
        from_end = sum(map(len, pieces[:unarmed]))
        expected = cut_whole(text, stops, from_end=from_end)
        shown, stop, last = run_pieces(pieces, stops, num_unarmed=unarmed)
        # what an unarmed piece showed cannot be taken back, but a match may begin in it and is then held
        assert (shown, stop) == expected, f"seed {seed}: {pieces} {stops} unarmed {unarmed}"
        if stop is not None:
            end = len(expected[0]) + len(stop)
            assert sum(map(len, pieces[:last])) < end <= sum(map(len, pieces[: last + 1])), f"seed {seed}"


def test_text_is_held_only_while_it_may_begin_a_stop():
    matcher = StopMatcher(["STOP"])
    assert matcher.push("go ST") == ("go ", None)
    assert matcher.push("A") == ("STA", None)
    assert matcher.flush() == ""


def test_held_text_comes_out_at_the_end():
    matcher = StopMatcher(["STOP"])
    assert matcher.push("x STO") == ("x ", None)
    assert matcher.flush() == "STO"
    assert matcher.flush() == ""


def test_no_stops_pass_text_through():
    assert StopMatcher([]).push("anything") == ("anything", None)


def test_longest_of_those_that_complete_together_wins():
    assert StopMatcher(["c", "abc", "bc"]).push("xabcx") == ("x", "abc")


def test_a_periodic_stop_costs_linear_time():
    """A naive search of the held text would take 10**10 comparisons here."""
    matcher = StopMatcher(["a" * 50_000 + "b"])
    assert matcher.push("a" * 200_000)[1] is None
    assert matcher.push("b") == ("a" * 0, "a" * 50_000 + "b")
