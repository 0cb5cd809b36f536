"""API keys."""

import pytest

from pilotfish.server.auth import check_key
from pilotfish.server.errors import Unauthorized


@pytest.mark.parametrize(
    "header", [None, "", "x", "Bearer", "Bearer ", "Bearer wrong", "Basic key-1", "Bearer \udcff", "Bearer key-1x"]
)
def test_wrong_keys_are_401(header):
    with pytest.raises(Unauthorized):
        check_key(header, ["key-1", "key-2"])


@pytest.mark.parametrize("header", ["Bearer key-1", "bearer key-2", "Bearer  key-2 "])
def test_each_key_opens(header):
    # metrics get the key's number, never the key
    assert check_key(header, ["key-1", "key-2"]) == ("1" if "1" in header else "2")


def test_without_keys_everyone_may():
    assert check_key(None, []) == "none"
