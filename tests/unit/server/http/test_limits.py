import pytest

from pilotfish.server.errors import BadRequest, TooManyRequests
from pilotfish.server.http.auth import KeyFileError, Keys, key_line
from pilotfish.server.http.limits import Limiter, Limits


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


def limiter(clock=None, **limits):
    return Limiter(lambda label: Limits(**limits) if label == "alice" else Limits(), clock or Clock())


def ask(limiter, label="alice", num_sequences=1):
    """As a handler does: the request is counted when it comes, its sequences once it is known how many."""
    limiter.count(label)
    with limiter.admit(label, num_sequences):
        pass


def test_sequences_at_a_time():
    limits = limiter(concurrent=3)
    with limits.admit("alice", 2):
        ask(limits)
        with pytest.raises(TooManyRequests) as caught:
            ask(limits, num_sequences=2)
        assert caught.value.status == 429 and int(caught.value.headers["Retry-After"]) >= 1
        ask(limits, "bob", 99)
    ask(limits, num_sequences=3)


def test_more_at_once_than_ever_allowed_is_no_reason_to_wait():
    with pytest.raises(BadRequest, match="3 sequences at a time, got 4"):
        ask(limiter(concurrent=3), num_sequences=4)


def test_what_fails_is_given_back():
    limits = limiter(concurrent=1)
    with pytest.raises(ZeroDivisionError), limits.admit("alice", 1):
        raise ZeroDivisionError
    ask(limits)


def test_what_is_left_behind_counts_until_it_has_gone():
    limiter, calls = Limiter(lambda label: Limits(concurrent=2)), []
    with limiter.admit("a", 2, lambda call: calls.extend([call] * 2)):
        pass
    with pytest.raises(TooManyRequests), limiter.admit("a", 1):
        pass
    calls.pop()()
    with limiter.admit("a", 1):
        pass
    calls.pop()()
    with limiter.admit("a", 2):
        pass


def test_requests_a_minute():
    clock = Clock()
    limits = limiter(clock, per_minute=6)
    for _ in range(6):
        ask(limits)
    for _ in range(2):
        # a refusal costs nothing
        with pytest.raises(TooManyRequests) as caught:
            ask(limits)
        assert caught.value.headers["Retry-After"] == "10"
    ask(limits, "bob")
    clock.now += 10
    ask(limits)
    with pytest.raises(TooManyRequests):
        ask(limits)
    clock.now += 3600
    for _ in range(6):
        ask(limits)
    with pytest.raises(TooManyRequests):
        ask(limits)


def test_a_request_that_is_refused_counts():
    limits = limiter(concurrent=1, per_minute=3)
    with limits.admit("alice", 1):
        for message in ("at a time", "at a time", "at a time", "a minute"):
            with pytest.raises(TooManyRequests, match=message):
                ask(limits)
    with pytest.raises(TooManyRequests, match="a minute"):
        limits.count("alice")


def test_every_sequence_counts_as_a_request():
    limits = limiter(per_minute=6)
    ask(limits, num_sequences=4)
    with pytest.raises(TooManyRequests) as caught:
        ask(limits, num_sequences=3)
    # the first of the three was counted as the request itself
    assert caught.value.headers["Retry-After"] == "10"
    with pytest.raises(BadRequest, match="each of the 7 sequences counts"):
        limits.check("alice", 7)
    limits.check("alice", 6)
    ask(limits, "bob", 1000)


def test_limits_stand_in_the_key_file(tmp_path):
    file = tmp_path / "keys"
    lines = [key_line("alice", "a") + " concurrent=2  per-minute=60", key_line("bob", "b"), key_line("eve", "e")]
    file.write_text("\n".join([*lines[:2], lines[2] + " per-minute=1", key_line("eve", "f") + " per-minute=1"]))
    keys = Keys(["given"], file)
    assert keys.check("Bearer a") == "alice"
    assert keys.limits("alice") == Limits(2, 60)
    assert keys.limits("bob") == keys.limits("1") == Limits()
    assert keys.limits("eve") == Limits(None, 1)


@pytest.mark.parametrize(
    "end", ["concurrent=0", "speed=3", "concurrent=1 concurrent=1", "concurrent", "concurrent=-1", "concurrent=x"]
)
def test_limits_that_are_none_are_named(tmp_path, end):
    (tmp_path / "keys").write_text(key_line("alice", "a") + " " + end)
    with pytest.raises(KeyFileError, match="line 1: want"):
        Keys(file=tmp_path / "keys")


def test_two_keys_of_a_label_have_the_same_limits(tmp_path):
    (tmp_path / "keys").write_text(key_line("alice", "a") + "\n" + key_line("alice", "b") + " concurrent=1")
    with pytest.raises(KeyFileError, match="line 2: want the same limits"):
        Keys(file=tmp_path / "keys")


def test_a_place_that_is_held_is_no_place_for_another_and_is_not_judged_by_admit():
    limits = limiter(concurrent=2)
    limits.check_place("alice")
    with limits.admit("alice", 1):
        limits.check_place("alice")
        with limits.hold_place("alice"):
            assert limits.num_held == 1
            with pytest.raises(TooManyRequests) as caught:
                limits.check_place("alice")
            assert int(caught.value.headers["Retry-After"]) >= 1
            limits.check_place("bob")
            # another that was worked out first is admitted, not refused for what is not worked out yet
            ask(limits)
        with pytest.raises(ZeroDivisionError), limits.hold_place("alice"):
            raise ZeroDivisionError
        assert limits.num_held == 0
        limits.check_place("alice")
