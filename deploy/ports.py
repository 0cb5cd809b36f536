"""A port for a server that starts soon."""

import random
import socket

PORTS = range(20000, 32000)
"""Ports below the range from which systems take the near ends of outgoing connections (32768 on, on Linux). Out of that
range another connection can take the port before the server does, and a client that asks again and again whether the
server is up can connect to itself."""


def is_taken(port: int) -> bool:
    """Whether something listens on that port of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens. Raises OSError if there is none."""
    for port in random.sample(PORTS, 64):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"64 ports of {PORTS} tried, and none is free")
