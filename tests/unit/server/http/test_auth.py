"""API keys: given one by one, or from a file that holds digests and may change."""

import logging
import os

import pytest

from pilotfish.server.errors import Unauthorized
from pilotfish.server.http.auth import KeyFileError, Keys, key_line, make_key


def refused(keys, key):
    with pytest.raises(Unauthorized):
        keys.check(f"Bearer {key}")
    return True


@pytest.mark.parametrize(
    "header", [None, "", "x", "Bearer", "Bearer ", "Bearer wrong", "Basic key-1", "Bearer \udcff", "Bearer key-1x"]
)
def test_wrong_keys_are_401(header):
    with pytest.raises(Unauthorized):
        Keys(["key-1", "key-2"]).check(header)


@pytest.mark.parametrize("header", ["Bearer key-1", "bearer key-2", "Bearer  key-2 "])
def test_each_key_opens(header):
    # metrics get the key's number, never the key
    assert Keys(["key-1", "key-2"]).check(header) == ("1" if "1" in header else "2")


def test_without_keys_everyone_may():
    assert Keys().check(None) == "none"


@pytest.fixture
def clock():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    return Clock()


def write(file, *lines):
    """As an editor does: a new file in the old one's place."""
    new = file.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n")
    os.replace(new, file)


def test_keys_of_a_file(tmp_path):
    file = tmp_path / "keys"
    write(file, "# ours", "", key_line("alice", "a"), "  " + key_line("bob.2", "b"))
    keys = Keys(["given"], file)
    assert [keys.check(f"Bearer {key}") for key in ("a", "b", "given")] == ["alice", "bob.2", "1"]
    assert refused(keys, "c")
    assert refused(keys, key_line("alice", "a").split(":")[1]), "the digest is no key"


def test_a_file_without_keys_lets_nobody_in(tmp_path):
    (tmp_path / "keys").write_text("")
    assert refused(Keys(file=tmp_path / "keys"), "")


def test_a_file_that_changes(tmp_path, clock, caplog):
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys"
    write(file, key_line("alice", "a"))
    keys = Keys(file=file, clock=clock)
    write(file, key_line("bob", "b"))
    assert keys.check("Bearer a") == "alice", "not looked at again within a second"
    clock.now = 1.0
    assert keys.check("Bearer b") == "bob" and refused(keys, "a")
    for breaking in (lambda: write(file, "bob b"), file.unlink):
        breaking()
        clock.now += 1
        assert keys.check("Bearer b") == "bob"
        assert "the keys stay as they were" in caplog.text
        caplog.clear()
        clock.now += 1
        keys.check("Bearer b")
        assert not caplog.text, "said once"
    write(file, key_line("carol", "c"))
    clock.now += 1
    assert keys.check("Bearer c") == "carol" and refused(keys, "b")
    assert "1 keys" in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        *("secret", "alice secret", "alice sha256:12", "1 sha256:" + "0" * 64),
        *("none sha256:" + "0" * 64, "a sha256:" + "G" * 64),
    ],
)
def test_a_line_that_is_none_is_named_and_not_shown(tmp_path, line):
    write(tmp_path / "keys", "", line)
    with pytest.raises(KeyFileError, match="line 2") as caught:
        Keys(file=tmp_path / "keys")
    assert "secret" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(KeyFileError, match="nothing"):
        Keys(file=tmp_path / "nothing")


def test_made_keys_are_long_and_their_labels_checked():
    assert len(make_key()) > 40 and make_key() != make_key()
    for label in ("", "1", "a b", "none", "a" * 65):
        with pytest.raises(ValueError, match="label"):
            key_line(label, "k")


def test_anthropics_header_is_as_good_and_either_of_two_keys_opens():
    keys = Keys(["key-1", "key-2"])
    assert keys.check(None, "key-2") == "2"
    assert keys.check("Bearer of another service", "key-1") == "1"
    assert keys.check("Bearer key-1", "wrong") == "1"
    for authorization, x_api_key in ((None, "wrong"), ("Bearer wrong", ""), ("key-1", None), (None, "Bearer key-1")):
        with pytest.raises(Unauthorized):
            keys.check(authorization, x_api_key)
