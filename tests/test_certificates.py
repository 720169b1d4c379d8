"""A server whose certificate is not trusted: every client says so at the first try, with the remedy."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlhf_suite.agents.base import Task
from rlhf_suite.agents.mcp_tools import McpServer
from rlhf_suite.agents.openenv import OpenEnvEnvironment
from rlhf_suite.agents.sandbox_fusion import RemotePython
from rlhf_suite.certificates import certificate_problem, certificates
from rlhf_suite.config.declarations.reward import HttpConfig
from rlhf_suite.data.images import fetch
from rlhf_suite.errors import RunError
from rlhf_suite.rewards.base import Sample, Scored
from rlhf_suite.rewards.remote import RemoteReward
from rlhf_suite.rl.teacher_endpoint import Endpoint

# Of nobody: for localhost, signed by itself, until 2126.
PEM = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgtUgVwcklzxHU0STk
8KBstSJkevX4Y34OiQGak7MDDZWhRANCAASdA5OXUaB7OM/6bF/puDdm9QlZp106
37bQ0bAQSqxxuLQ1yh+4JCm9PXdtfG79zpJvsB8UpM1bS8LjcaOy4+Ps
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUeZOhqjLFJlW/G6ap3qZLtyDfXI0wCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyODEzMDMzNVoYDzIxMjYxMTA0
MTMwMzM1WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASdA5OXUaB7OM/6bF/puDdm9QlZp10637bQ0bAQSqxxuLQ1yh+4JCm9
PXdtfG79zpJvsB8UpM1bS8LjcaOy4+Pso28wbTAdBgNVHQ4EFgQUKunFJrQJ5edT
PkWdPFpoqK7N7qMwHwYDVR0jBBgwFoAUKunFJrQJ5edTPkWdPFpoqK7N7qMwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIgUXYZYzYVIpRvkThPK9vx3A0tg1PoChApYfboU4WK3RkCIQCu
H3uUFdzz73/3Y10vwPw/J4IJzinciQPdkgWpuhVTHw==
-----END CERTIFICATE-----
"""
REMEDY = r"the certificate of the server is not trusted \(self.signed certificate\)\. .* SSL_CERT_FILE"


class Answer(BaseHTTPRequestHandler):
    """Answers each POST with one reward."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"rewards": [0.5]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """A server that counts the connections that it was asked for."""

    connections = 0

    def get_request(self):  # type: ignore[no-untyped-def]
        self.connections += 1
        return super().get_request()

    def handle_error(self, *words: object) -> None:
        """Say nothing of clients that close the connection."""


@pytest.fixture(params=["127.0.0.1"])
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Server]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    (tmp_path / "server.pem").write_text(PEM)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    made = Server((request.param, 0), Answer)
    made.socket = context.wrap_socket(made.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    certificates.cache_clear()
    yield made
    made.shutdown()
    made.server_close()
    certificates.cache_clear()


def score(url: str) -> object:
    sample = Sample("1 + 1 = 2", "1 + 1 =", " 2", "2", "default")
    return RemoteReward([url], HttpConfig()).score([sample])[0]


def ask_teacher(url: str) -> object:
    return asyncio.run(Endpoint("teacher.model_name_or_path", f"{url}/v1", HttpConfig()).tokenize())


def reset(url: str) -> object:
    environment = OpenEnvEnvironment(url.replace("https", "wss"), None, None)
    return asyncio.run(environment.reset(Task([5], "a question")))


def list_tools(url: str) -> object:
    return asyncio.run(McpServer(f"{url}/mcp").of_episode().schemas())


CLIENTS: dict[str, Callable[[str], object]] = {
    "reward": score,
    "teacher": ask_teacher,
    "environment": reset,
    "sandbox": lambda url: asyncio.run(RemotePython(url, 64).run_async("print(4)", 7.0)),
    "tools": list_tools,
    "image": lambda url: fetch(f"{url}/image.png"),
}


@pytest.mark.notices(
    "a certificate that is not trusted is asked for again and again",
    "rewards/remote.py",
    "if problem := certificate_problem(error):",
    "if problem := None:",
    cases="reward",
)
@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_a_certificate_that_is_not_trusted_ends_the_first_try(server, client):
    with pytest.raises(Exception, match=REMEDY):
        client(f"https://localhost:{server.server_port}")
    assert server.connections == 1


def test_the_remedy_is_one(server, tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
    assert score(f"https://localhost:{server.server_port}") == Scored(0.5, 0.5)


@pytest.mark.parametrize("server", ["127.0.0.2"], indirect=True)
def test_a_certificate_of_another_host_has_its_own_remedy(server, tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
    with pytest.raises(RunError, match=r"\(IP address mismatch.*Use a host name"):
        score(f"https://127.0.0.2:{server.server_port}")


def test_other_failures_of_a_connection_may_pass():
    assert certificate_problem(ConnectionRefusedError()) is None
    assert certificate_problem(ExceptionGroup("two", [ValueError(), ssl.SSLError()])) is None
