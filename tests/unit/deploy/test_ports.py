import socket

import pytest

from pilotfish.deploy import ports
from pilotfish.deploy.ports import free_port, is_taken


def test_a_port_is_given_once_and_to_servers_alone(monkeypatch):
    port = free_port()
    assert not is_taken(port)
    monkeypatch.setattr(ports, "PORTS", [port] * 64)
    with pytest.raises(OSError, match="none is free"):
        free_port()
    # twice, as one that comes back at its address
    for _ in range(2):
        with socket.create_server(("127.0.0.1", port)):
            assert is_taken(port)
