"""HTTPS with certificates made here: requests, streams, clients' own certificates, renewal, and unusable files."""

import asyncio
import json
import socket
import ssl
import subprocess
import time

import pytest
import trustme
from processes import SERVE, status, until
from serving import ENVIRONMENT, PATIENCE, script

from pilotfish.deploy.ports import free_port
from pilotfish.server.http.tls import TlsError, TlsFiles, make_context, refresh


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


def write_certificate(authority, folder, *names, suffix=""):
    issued = authority.issue_cert(*(names or ("localhost", "127.0.0.1")))
    chain, key = folder / f"chain{suffix}.pem", folder / f"key{suffix}.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return chain, key


@pytest.fixture
def trusting(authority):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


class Served:
    def __init__(self, folder, *flags):
        self.port = free_port()
        command = [*SERVE, str(folder), "--port", str(self.port), "--core", "scripted_core:make_core", *flags]
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(command, env=ENVIRONMENT, stderr=self.log)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.terminate()
        self.process.wait(PATIENCE)
        self.log.close()

    def request(self, context, method="GET", path="/ready", body=None):
        """Status and whole answer, on a connection of its own. In TLS 1.3 a refusal may be an end without an answer."""
        with (
            socket.create_connection(("localhost", self.port), timeout=PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            data = json.dumps(body).encode() if body is not None else b""
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        if not answer:
            raise ConnectionError("no answer")
        return int(answer.split()[1]), answer.decode()


def test_requests_and_streams_over_https(folder, authority, trusting):
    chain, key = write_certificate(authority, folder)
    with Served(folder, "--ssl-certfile", str(chain), "--ssl-keyfile", str(key)) as server:
        until(lambda: server.request(trusting)[0] == 200, "ready")
        body = {"prompt": script(reply="over TLS", runs=[2, 3]), "max_tokens": 20, "stream": True}
        code, answer = server.request(trusting, "POST", "/v1/completions", body)
        assert code == 200 and answer.rstrip().endswith("0") and "data: [DONE]" in answer
        text = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in text) == "over TLS"
        # who does not trust the authority, and who does not speak TLS, gets nothing
        with pytest.raises(ssl.SSLCertVerificationError):
            server.request(ssl.create_default_context())
        with pytest.raises((OSError, ValueError)):
            status(f"http://127.0.0.1:{server.port}/ready")
        assert server.request(trusting)[0] == 200
        assert "https://127.0.0.1" in (folder / "log").read_text()


def test_clients_certificates_can_be_required(folder, authority, trusting):
    chain, key = write_certificate(authority, folder)
    clients, strangers = trustme.CA(), trustme.CA()
    clients.cert_pem.write_to_path(str(folder / "clients.pem"))
    flags = ["--ssl-certfile", str(chain), "--ssl-keyfile", str(key), "--ssl-cert-reqs", "2"]
    with Served(folder, *flags, "--ssl-ca-certs", str(folder / "clients.pem")) as server:
        clients.issue_cert("bot@example.org").configure_cert(known := ssl.create_default_context())
        authority.configure_trust(known)
        until(lambda: server.request(known)[0] == 200, "ready")
        strangers.issue_cert("bot@example.org").configure_cert(unknown := ssl.create_default_context())
        authority.configure_trust(unknown)
        for refused in (trusting, unknown):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                server.request(refused)


def test_a_renewed_certificate_is_used_without_a_restart(folder, authority, trusting):
    async def main():
        chain, key = write_certificate(authority, folder)
        files = TlsFiles(chain, key)
        context = make_context(files)
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]

        async def serial():
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname="localhost")
            number = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
            writer.close()
            await writer.wait_closed()
            return number

        async def until_other(than):
            deadline = time.monotonic() + PATIENCE
            while (number := await serial()) == than and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            return number

        watching = asyncio.create_task(refresh(context, files, 0.02))
        first = await serial()
        # half a renewal, then garbage: the old one stays
        new_chain, new_key = write_certificate(authority, folder, "localhost", suffix="-new")
        chain.write_bytes(new_chain.read_bytes())
        await asyncio.sleep(0.2)
        assert await serial() == first
        key.write_bytes(new_key.read_bytes())
        second = await until_other(first)
        assert second != first
        key.write_text("garbage")
        await asyncio.sleep(0.2)
        assert await serial() == second
        watching.cancel()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_key_and_certificate_may_share_a_file(folder, authority):
    chain, key = write_certificate(authority, folder)
    (folder / "both.pem").write_bytes(key.read_bytes() + chain.read_bytes())
    make_context(TlsFiles(folder / "both.pem"))


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (lambda chain, key, folder: TlsFiles(folder / "none.pem", key), "none.pem"),
        (lambda chain, key, folder: TlsFiles(chain, chain), "chain.pem"),
        (lambda chain, key, folder: TlsFiles(chain), "chain.pem"),
        (lambda chain, key, folder: TlsFiles(chain, key, cert_reqs=2), "--ssl-ca-certs"),
        (lambda chain, key, folder: TlsFiles(chain, key, key, 1), "key.pem: want certificates of authorities"),
    ],
)
def test_files_that_cannot_be_used_are_named(folder, authority, files, named):
    with pytest.raises(TlsError, match=named):
        make_context(files(*write_certificate(authority, folder), folder))


@pytest.mark.parametrize("flags", (["--ssl-certfile", "none.pem"], ["--ssl-keyfile", "key.pem"]))
def test_the_command_ends_with_the_reason(folder, flags):
    ended = subprocess.run(
        [*SERVE, str(folder), *flags], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, timeout=PATIENCE
    )
    assert ended.returncode == 2
    assert "none.pem" in ended.stderr or "--ssl-certfile" in ended.stderr
    assert "Traceback" not in ended.stderr
