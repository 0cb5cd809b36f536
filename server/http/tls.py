"""TLS: a context from PEM files, and certificates that are renewed while the server runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from pilotfish.engine.errors import PilotfishError
from pilotfish.server.http.watched import version_of

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0


class TlsError(PilotfishError):
    """The files cannot be used; the message says which and why."""


@dataclass(frozen=True)
class TlsFiles:
    """`keyfile` None: the key stands in `certfile`. `cert_reqs` as in Python's ssl: 0, 1 (optional), 2 (required)."""

    certfile: Path
    keyfile: Path | None = None
    ca_certs: Path | None = None
    cert_reqs: int = 0


def make_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS 1.2 and later. Raises TlsError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load(context, files)
    if files.cert_reqs:
        if files.ca_certs is None:
            raise TlsError("--ssl-cert-reqs: want --ssl-ca-certs, the authorities whose clients are let in")
        try:
            context.load_verify_locations(files.ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise TlsError(f"{files.ca_certs}: want certificates of authorities in PEM form: {error}") from None
        context.verify_mode = ssl.VerifyMode(files.cert_reqs)
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    names = f"{files.certfile}" + (f" and {files.keyfile}" if files.keyfile else "")
    try:
        # an empty password in place of a question on the terminal
        context.load_cert_chain(files.certfile, files.keyfile, password="")
    except (OSError, ssl.SSLError) as error:
        raise TlsError(f"{names}: want a certificate chain and its key, unencrypted, in PEM form: {error}") from None


async def refresh(context: ssl.SSLContext, files: TlsFiles, seconds: float = LOOK_SECONDS) -> None:
    """Looks for ever: new connections get the certificate that the files hold now; one that cannot be used is left
    out."""

    def versions() -> list[tuple[int, ...]]:
        return [version_of(file) for file in (files.certfile, files.keyfile) if file]

    seen = versions()
    while True:
        await asyncio.sleep(seconds)
        if (now := versions()) == seen:
            continue
        seen = now
        try:
            # a try on the side: a chain without its key would leave the context half changed
            make_context(files)
            _load(context, files)
        except TlsError as error:
            logger.error("%s; the certificate stays as it was", error)
        else:
            logger.info("%s: a new certificate is in use", files.certfile)
