"""One streaming client in a process of its own: how long it waits between two events of its stream.

    python -m tests.soak.victim HOST PORT '{"prompt": ..., "stream": true}'

Asks for the same stream again whenever one has ended, until its standard input is closed. Writes a line when the first
event has come, and at the end the gaps inside streams as JSON.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections.abc import Iterator

PATIENCE = 120.0


def events(host: str, port: int, body: bytes) -> Iterator[bool]:
    """True for each piece of the stream with an event in it; False while there is nothing."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_connection((host, port), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        connection.settimeout(0.5)
        first = True
        while True:
            try:
                piece = connection.recv(1 << 20)
            except TimeoutError:
                yield False
                continue
            if first and not piece.startswith(b"HTTP/1.1 200"):
                raise ConnectionError(f"want a stream, got {piece[:300]!r}")
            first = False
            if not piece:
                return
            if b"data: {" in piece:
                yield True


def main() -> int:
    host, port, body = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
    closed = selectors.DefaultSelector()
    closed.register(sys.stdin, selectors.EVENT_READ)
    gaps: list[float] = []
    errors: list[str] = []
    told = False
    while not closed.select(0):
        last = None
        try:
            for came in events(host, port, body):
                now = time.monotonic()
                if came and last is not None:
                    gaps.append(now - last)
                if came:
                    last = now
                if came and not told:
                    print("streaming", flush=True)
                    told = True
                if closed.select(0):
                    # the silence that was not over counts as well
                    gaps += [now - last] if last is not None and not came else []
                    break
        except (ConnectionError, OSError) as error:
            errors.append(f"{type(error).__name__}: {error}")
            time.sleep(0.2)
    print(json.dumps({"gaps": gaps, "errors": errors}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
