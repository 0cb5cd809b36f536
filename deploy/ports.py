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
    """A port of 127.0.0.1 on which nothing listens, and which no other process is given as long as this one lives.

    It stays bound here, without a listener. Servers set SO_REUSEADDR, and so may listen on it; a search does not, and
    finds it taken. Raises OSError if there is none.
    """
    for port in random.SystemRandom().sample(PORTS, 64):
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.detach()
        return port
    raise OSError(f"64 ports of {PORTS} tried, and none is free")
