"""API keys: a bearer token compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from pilotfish.server.errors import Unauthorized

BEARER = "bearer "


NO_KEY = "none"


def check_key(header: str | None, keys: Sequence[str]) -> str:
    """The number of the key, from 1: what metrics may show of it. No keys: everyone may, as NO_KEY.

    Raises Unauthorized unless the Authorization header carries one of the keys.
    """
    if not keys:
        return NO_KEY
    if header is None or header[: len(BEARER)].lower() != BEARER:
        raise Unauthorized("Missing API key: want the header 'Authorization: Bearer KEY'.", code="missing_api_key")
    offered = header[len(BEARER) :].strip().encode("utf-8", "surrogateescape")
    # every key is compared, so that time does not tell which one came close
    matches = [hmac.compare_digest(offered, key.encode("utf-8")) for key in keys]
    if not any(matches):
        raise Unauthorized("Incorrect API key provided.", code="invalid_api_key")
    return str(1 + matches.index(True))
