"""Transport: TLS, options that every channel has, addresses that are wrong."""

from __future__ import annotations

import shutil
import subprocess
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fusecache.errors import Unavailable, UsageError
from fusecache.rpc.budget import Budget
from tests.support.log_noise import Declare
from tests.support.scripted_alluxio import ScriptedAlluxio
from tests.t1_rpc.conftest import MakeClient


class Pem(NamedTuple):
    """Files of one certificate."""

    certificate: Path
    key: Path


def self_signed(folder: Path, name: str) -> Pem:
    """A certificate for 127.0.0.1 that is its own authority."""
    files = Pem(folder / f"{name}.crt", folder / f"{name}.key")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", files.key, "-out", files.certificate),
        ],
        check=True,
        capture_output=True,
    )
    return files


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pem]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")
    return {name: self_signed(folder, name) for name in ("server", "client", "stranger")}


@pytest.fixture
def secured(servers: list[ScriptedAlluxio], pems: dict[str, Pem]) -> Callable[[bool], ScriptedAlluxio]:
    """secured(mutual): a running server that speaks TLS."""

    def start(mutual: bool) -> ScriptedAlluxio:
        server = ScriptedAlluxio()
        servers.append(server)
        server.serve_tls(
            pems["server"].key.read_bytes(),
            pems["server"].certificate.read_bytes(),
            client_ca=pems["client"].certificate.read_bytes() if mutual else None,
        )
        return server.start()

    return start


def test_tls_server_of_a_trusted_authority_is_spoken_to(
    secured: Callable[[bool], ScriptedAlluxio], pems: dict[str, Pem], make_client: MakeClient, budget: Budget
) -> None:
    client = make_client(secured(False), tls=True, tls_ca_file=pems["server"].certificate)
    assert client.connect(budget).version == "2.9.3"


def test_tls_own_certificate_is_shown_where_it_is_asked_for(
    secured: Callable[[bool], ScriptedAlluxio], pems: dict[str, Pem], make_client: MakeClient, budget: Budget
) -> None:
    client = make_client(
        secured(True),
        tls=True,
        tls_ca_file=pems["server"].certificate,
        tls_cert_file=pems["client"].certificate,
        tls_key_file=pems["client"].key,
    )
    assert client.connect(budget).version == "2.9.3"


@pytest.mark.parametrize("case", ["stranger's authority", "no certificate", "plaintext"])
def test_tls_who_does_not_fit_gets_no_answer(
    secured: Callable[[bool], ScriptedAlluxio],
    pems: dict[str, Pem],
    make_client: MakeClient,
    short: Callable[[], Budget],
    expected_logs: Declare,
    case: str,
) -> None:
    expected_logs("master does not answer")
    server = secured(case == "no certificate")
    if case == "plaintext":
        client = make_client(server)
    else:
        trusted = "stranger" if case == "stranger's authority" else "server"
        client = make_client(server, tls=True, tls_ca_file=pems[trusted].certificate)
    with pytest.raises(Unavailable):
        client.connect(short())
    assert not server.received


@pytest.mark.parametrize(
    ("setting", "content", "said"),
    [
        ("tls_ca_file", None, "No such file"),
        ("tls_ca_file", b"not a certificate", "PEM"),
    ],
)
def test_tls_file_that_can_not_be_used_is_named(
    make_client: MakeClient, tmp_path: Path, setting: str, content: bytes | None, said: str
) -> None:
    path = tmp_path / "authority.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"{setting}: .*authority\.pem.*{said}"):
        make_client("127.0.0.1:1", tls=True, **{setting: path})


def test_channel_proxy_of_the_environment_is_not_used(
    master: ScriptedAlluxio, make_client: MakeClient, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    assert make_client(master).connect(budget).primary == master.target


def test_f17_channel_that_got_no_thread_gets_it_later(
    master: ScriptedAlluxio,
    make_client: MakeClient,
    short: Callable[[], Budget],
    budget: Budget,
    monkeypatch: pytest.MonkeyPatch,
    expected_logs: Declare,
) -> None:
    """grpcio by itself never serves a channel again whose thread it could not start."""
    expected_logs("master does not answer", optional=True)
    client = make_client(master)
    refused: list[str] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if any(call.name == "_run_channel_spin_thread" for call in traceback.extract_stack()):  # none of the server's
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Unavailable, match="no thread"):
            client.connect(short())
    assert len(refused) > 1
    assert client.connect(budget).primary == master.target


@pytest.mark.parametrize("target", ["no-such-host.invalid:19998", "127.0.0.1:1", "[::1]:1"])
def test_channel_address_that_leads_nowhere_is_named_in_the_error(
    make_client: MakeClient, short: Callable[[], Budget], expected_logs: Declare, target: str
) -> None:
    expected_logs("master does not answer")
    with pytest.raises(Unavailable) as failure:
        make_client(target).connect(short())
    assert target in str(failure.value)
    assert "\n" not in str(failure.value)
