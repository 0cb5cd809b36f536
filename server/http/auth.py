"""API keys: bearer tokens, or `x-api-key` as Anthropic's clients send it, kept and compared as SHA-256 digests.

A key file has a line for each key, `LABEL sha256:DIGEST`; `pilotfish key LABEL` makes one. After it may stand
`concurrent=N` (sequences at a time) and `per-minute=N` (requests), which hold for the label. The digest is not salted
or slow: keys are 256 random bits, which no list contains. The file is looked at again, at most once a second, when a
key is checked; a version that cannot be read leaves the keys as they are.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pilotfish.engine.errors import PilotfishError
from pilotfish.server.errors import Unauthorized
from pilotfish.server.http.limits import NO_LIMITS, Limits
from pilotfish.server.http.watched import version_of

logger = logging.getLogger(__name__)

BEARER = "bearer "
NO_KEY = "none"
"""The label of everyone where there are no keys."""
LOOK_SECONDS = 1.0
LABEL = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
LINE = re.compile(rf"({LABEL.pattern})\s+sha256:([0-9a-f]{{64}})((?:\s+[a-z-]+=[0-9]+)*)")
LIMITS = {"concurrent": "concurrent", "per-minute": "per_minute"}
"""The limits' names in the file, and ours."""


class KeyFileError(PilotfishError):
    """The file cannot be used; the message names it and the line."""


def make_key() -> str:
    return "pf-" + secrets.token_urlsafe(32)


def key_line(label: str, key: str) -> str:
    """What a key file holds of a key. Raises ValueError for another label than the file allows."""
    if not LABEL.fullmatch(label) or label == NO_KEY:
        raise ValueError(f"want a label of letters, digits, '.', '_' and '-' that begins with a letter, got {label!r}")
    return f"{label} sha256:{hashlib.sha256(key.encode()).hexdigest()}"


class Keys:
    """Keys given one by one, labelled by their number from 1, and those of a file. None at all: everyone may.

    With a file keys are always wanted, even while it has none.
    """

    def __init__(
        self, keys: Sequence[str] = (), file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._given = [(hashlib.sha256(key.encode()).digest(), str(number)) for number, key in enumerate(keys, 1)]
        self._file = file
        self._clock = clock
        self._looked = clock()
        self._seen: tuple[int, ...] | None = None
        self._read: list[tuple[bytes, str]] = []
        self._limits: dict[str, Limits] = {}
        if file is not None:
            self._seen = version_of(file)
            self._read, self._limits = _read_file(file)

    def limits(self, label: str) -> Limits:
        return self._limits.get(label, NO_LIMITS)

    def check(self, authorization: str | None, x_api_key: str | None = None) -> str:
        """The label of the key: what metrics may show of it.

        Raises Unauthorized unless one of the headers Authorization and x-api-key carries one of the keys.
        """
        if self._file is None and not self._given:
            return NO_KEY
        bearer = authorization is not None and authorization[: len(BEARER)].lower() == BEARER
        offers = [] if authorization is None or not bearer else [authorization[len(BEARER) :]]
        offers += [] if x_api_key is None else [x_api_key]
        if not offers:
            raise Unauthorized("Missing API key: want the header 'Authorization: Bearer KEY'.", code="missing_api_key")
        self._look_again()
        offered = [hashlib.sha256(offer.strip().encode("utf-8", "surrogateescape")).digest() for offer in offers]
        # every key is compared, so that time does not tell which one came close
        keys = [(given, key) for given in offered for key in (*self._given, *self._read)]
        matches = [label for given, (digest, label) in keys if hmac.compare_digest(given, digest)]
        if not matches:
            raise Unauthorized("Incorrect API key provided.", code="invalid_api_key")
        return matches[0]

    def find(self, authorization: str | None, x_api_key: str | None = None) -> str:
        """The same where no key is wanted: NO_KEY without one, and for one that is not ours."""
        try:
            return self.check(authorization, x_api_key)
        except Unauthorized:
            return NO_KEY

    def _look_again(self) -> None:
        now = self._clock()
        if self._file is None or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        version = version_of(self._file)
        if version == self._seen:
            return
        self._seen = version
        try:
            self._read, self._limits = _read_file(self._file)
        except KeyFileError as error:
            logger.error("%s; the keys stay as they were", error)
            return
        logger.info("%s: %d keys", self._file, len(self._read))


def read_plain_keys(file: Path) -> list[str]:
    """A key a line, as llama.cpp's key files and mounted secrets have them. Raises KeyFileError."""
    try:
        keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"key file {file} cannot be read: {error}") from error
    if not any(keys):
        raise KeyFileError(f"key file {file}: want a key a line, got none")
    return [key for key in keys if key]


def _read_file(file: Path) -> tuple[list[tuple[bytes, str]], dict[str, Limits]]:
    """Digests with their labels, and the labels' limits."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"key file {file} cannot be read: {error}") from error
    keys, limits = [], dict[str, Limits]()
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        found = LINE.fullmatch(line)
        if found is None or found[1] == NO_KEY:
            # not the line itself: it may be a key
            raise KeyFileError(f"key file {file}, line {number}: want 'LABEL sha256:' and 64 hexadecimal digits")
        keys.append((bytes.fromhex(found[2]), found[1]))
        try:
            own = _read_limits(found[3])
            if limits.setdefault(found[1], own) != own:
                raise ValueError(f"want the same limits for every key of {found[1]}")
        except ValueError as error:
            raise KeyFileError(f"key file {file}, line {number}: {error}") from error
    return keys, limits


def _read_limits(text: str) -> Limits:
    """Raises ValueError."""
    values: dict[str, int] = {}
    for word in text.split():
        name, _, number = word.partition("=")
        if name not in LIMITS or LIMITS[name] in values or int(number) < 1:
            raise ValueError(f"want each of {', '.join(LIMITS)} at most once and at least 1, got {word}")
        values[LIMITS[name]] = int(number)
    return Limits(**values)
