"""Who may call the embedded server, what it says of itself, and what it keeps over restarts."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from fusecache.embedded.server import EmbeddedServer
from fusecache.embedded.state import state_folder_for
from fusecache.errors import FusecacheError, StateError, UsageError
from fusecache.pb.alluxio import version_pb2
from fusecache.pb.alluxio.block_master_pb2 import (
    CAPACITY_BYTES,
    FREE_BYTES,
    USED_BYTES,
    GetBlockMasterInfoPOptions,
    GetWorkerInfoListPOptions,
)
from fusecache.pb.alluxio.block_worker_pb2 import ReadRequest
from fusecache.pb.alluxio.file_system_master_pb2 import GetStatusPRequest
from fusecache.pb.alluxio.meta_master_pb2 import GetConfigurationPOptions, GetMasterInfoPOptions
from fusecache.pb.alluxio.sasl_server_pb2 import CHALLENGE, CUSTOM, NOSASL, SIMPLE, SUCCESS, SaslMessage
from fusecache.pb.alluxio.version_pb2 import GetServiceVersionPRequest
from tests.support.embedded import WireClient, embedded_server, read_request, wait_until


@pytest.fixture
def server(source: Path, tmp_path: Path) -> Iterator[EmbeddedServer]:
    with embedded_server(source, tmp_path / "state", block_workers=2) as running:
        yield running


def code(failure: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    found: grpc.StatusCode = failure.value.code()
    return found


def hello(**fields: object) -> SaslMessage:
    """A correct first message, with some fields replaced."""
    first = SaslMessage(
        messageType=CHALLENGE,
        authenticationScheme=SIMPLE,
        clientId=str(uuid.uuid4()).encode(),
        message=b"\0alice\0secret",
    )
    for name, value in fields.items():
        setattr(first, name, value)
    return first


# -- authentication ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [SIMPLE, CUSTOM])
def test_handshake_is_answered_with_success(server: EmbeddedServer, scheme: int) -> None:
    with WireClient(server.master_target, sasl=hello(authenticationScheme=scheme)) as client:
        assert client.handshake_answer.messageType == SUCCESS
        assert server.authentications[0].users() == ["alice"]
        assert client.stat(b"/").folder


WRONG: list[dict[str, object]] = [
    {"authenticationScheme": NOSASL},
    {"messageType": SUCCESS},
    {"clientId": b""},
    {"message": b"\0alice\0"},
    {"message": b"\0\0secret"},
    {"message": b"alice"},
    {"message": b"bob\0alice\0secret"},
]


def test_wrong_handshake_is_unauthenticated(server: EmbeddedServer) -> None:
    for wrong in WRONG:
        with pytest.raises(grpc.RpcError) as failure:
            WireClient(server.master_target, sasl=hello(**wrong))
        assert code(failure) == grpc.StatusCode.UNAUTHENTICATED, wrong
    assert server.authentications[0].users() == []


def test_impersonation_is_allowed_to_those_named(source: Path, tmp_path: Path) -> None:
    with (
        embedded_server(source, tmp_path / "state", impersonators=("alice",)) as running,
        WireClient(running.master_target, sasl=hello(message=b"bob\0alice\0secret")),
    ):
        assert running.authentications[0].users() == ["bob"]


def test_call_without_channel_id_is_unauthenticated(server: EmbeddedServer) -> None:
    with WireClient(server.master_target, auth=False) as client, pytest.raises(grpc.RpcError) as failure:
        client.stat(b"/")
    assert code(failure) == grpc.StatusCode.UNAUTHENTICATED
    assert "missing" in str(failure.value.details())


def test_channel_id_of_another_server_is_unauthenticated(server: EmbeddedServer) -> None:
    with WireClient(server.master_target) as master, WireClient(server.worker_targets[0], auth=False) as worker:
        worker.metadata = master.metadata
        with pytest.raises(grpc.RpcError) as failure:
            worker.read(ReadRequest(block_id=1 << 24, offset=0, length=1, chunk_size=1))
    assert code(failure) == grpc.StatusCode.UNAUTHENTICATED
    assert "not authenticated" in str(failure.value.details())


def test_channel_is_forgotten_when_its_handshake_stream_ends(server: EmbeddedServer) -> None:
    with WireClient(server.master_target) as client:
        client.handshake.cancel()
        wait_until(lambda: not server.authentications[0].users())
        with pytest.raises(grpc.RpcError) as failure:
            client.stat(b"/")
    assert code(failure) == grpc.StatusCode.UNAUTHENTICATED


def test_second_handshake_with_one_id_spoils_both(server: EmbeddedServer) -> None:
    first = hello()
    with WireClient(server.master_target, sasl=first) as client:
        client.stat(b"/")
        with pytest.raises(grpc.RpcError) as failure:
            WireClient(server.master_target, sasl=first)
        assert code(failure) == grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as failure:
            client.stat(b"/")
        assert code(failure) == grpc.StatusCode.UNAUTHENTICATED


def test_forgotten_channels_must_handshake_again(server: EmbeddedServer) -> None:
    with WireClient(server.master_target) as client:
        server.authentications[0].forget_all()
        with pytest.raises(grpc.RpcError) as failure:
            client.stat(b"/")
        assert code(failure) == grpc.StatusCode.UNAUTHENTICATED
    with WireClient(server.master_target) as client:
        assert client.stat(b"/").folder


def test_nosasl_server_has_no_handshake_and_asks_for_no_id(source: Path, tmp_path: Path) -> None:
    with embedded_server(source, tmp_path / "state", auth="nosasl") as running:
        with pytest.raises(grpc.RpcError) as failure:
            WireClient(running.master_target)
        assert code(failure) == grpc.StatusCode.UNIMPLEMENTED
        with WireClient(running.master_target, auth=False) as client:
            assert client.stat(b"/").folder


# -- what it says of itself --------------------------------------------------------------------------------


def test_version_service_needs_no_authentication_and_tells_master_from_worker(server: EmbeddedServer) -> None:
    def version(client: WireClient, service: version_pb2.ServiceType) -> int:
        answer = client.versions.getServiceVersion(GetServiceVersionPRequest(serviceType=service))
        found: int = answer.version
        return found

    with (
        WireClient(server.master_target, auth=False) as master,
        WireClient(server.worker_targets[0], auth=False) as worker,
    ):
        for service in (
            version_pb2.FILE_SYSTEM_MASTER_CLIENT_SERVICE,
            version_pb2.FILE_SYSTEM_MASTER_WORKER_SERVICE,
            version_pb2.BLOCK_MASTER_CLIENT_SERVICE,
            version_pb2.META_MASTER_CONFIG_SERVICE,
            version_pb2.META_MASTER_CLIENT_SERVICE,
        ):
            assert version(master, service) == 2
        assert version(worker, version_pb2.BLOCK_WORKER_CLIENT_SERVICE) == 1
        for client, service in (
            (master, version_pb2.BLOCK_WORKER_CLIENT_SERVICE),
            (worker, version_pb2.META_MASTER_CLIENT_SERVICE),
            (master, version_pb2.UNKNOWN_SERVICE),
        ):
            with pytest.raises(grpc.RpcError) as failure:
                version(client, service)
            assert code(failure) == grpc.StatusCode.NOT_FOUND


def test_configuration_needs_no_authentication(server: EmbeddedServer, source: Path) -> None:
    with WireClient(server.master_target, auth=False) as client:
        answer = client.configuration.GetConfiguration(GetConfigurationPOptions(rawValue=True))
    found = {item.name: item.value for item in answer.clusterConfigs}
    assert found[b"alluxio.security.authentication.type"] == b"SIMPLE"
    assert found[b"alluxio.user.block.size.bytes.default"] == str(1 << 30).encode()
    assert found[b"alluxio.master.mount.table.root.ufs"] == os.fsencode(source)


def test_worker_list_tells_every_worker_where_it_listens(server: EmbeddedServer) -> None:
    with WireClient(server.master_target) as client:
        answer = client.blocks.GetWorkerInfoList(GetWorkerInfoListPOptions(), metadata=client.metadata)
    targets = [f"{info.address.host.decode()}:{info.address.dataPort}" for info in answer.workerInfos]
    assert tuple(targets) == server.worker_targets
    assert [info.address.host for info in answer.workerInfos] == [b"127.0.0.1", b"127.0.0.2"]
    assert len({info.id for info in answer.workerInfos}) == 2
    assert all(info.capacityBytes > 0 and info.usedBytes == 0 for info in answer.workerInfos)


def test_capacity_counts_the_blocks_held(source: Path, tmp_path: Path) -> None:
    (source / "file").write_bytes(b"x" * 1000)
    with (
        embedded_server(source, tmp_path / "state", block_workers=2, capacity_bytes=5000) as running,
        WireClient(running.master_target) as client,
        WireClient(running.worker_targets[0]) as worker,
    ):
        worker.read(read_request(client.stat(b"/file")))
        every = client.blocks.GetBlockMasterInfo(GetBlockMasterInfoPOptions(), metadata=client.metadata)
        some = client.blocks.GetBlockMasterInfo(
            GetBlockMasterInfoPOptions(filters=[CAPACITY_BYTES, FREE_BYTES, USED_BYTES]), metadata=client.metadata
        )
    info = every.blockMasterInfo
    assert (info.capacityBytes, info.freeBytes, info.usedBytes, info.liveWorkerNum) == (10000, 9000, 1000, 2)
    assert some.blockMasterInfo.usedBytes == 1000
    assert not some.blockMasterInfo.HasField("liveWorkerNum")


# -- over restarts -----------------------------------------------------------------------------------------


def identity(running: EmbeddedServer) -> tuple[bytes, dict[bytes, int]]:
    with WireClient(running.master_target) as client:
        answer = client.meta.GetMasterInfo(GetMasterInfoPOptions(), metadata=client.metadata)
        assert answer.masterInfo.rpcPort == int(running.master_target.rpartition(":")[2])
        ids = {info.path: info.fileId for info in client.entries(b"/", recursive=True)}
        cluster: bytes = answer.masterInfo.clusterId
        return cluster, ids


def test_ids_and_cluster_id_survive_a_restart(source: Path, tmp_path: Path) -> None:
    (source / "a" / "b").mkdir(parents=True)
    for name in ("a/x", "a/b/y", "z"):
        (source / name).write_bytes(b"1")
    with embedded_server(source, tmp_path / "state") as running:
        first = identity(running)
    with embedded_server(source, tmp_path / "state") as running:
        assert identity(running) == first
        (source / "new").write_bytes(b"1")
        with WireClient(running.master_target) as client:
            assert client.stat(b"/new").fileId not in first[1].values()


def test_two_clusters_have_different_ids(source: Path, tmp_path: Path) -> None:
    with embedded_server(source, tmp_path / "one") as one, embedded_server(source, tmp_path / "two") as two:
        assert one.cluster_id != two.cluster_id


def test_block_size_of_known_files_survives_a_new_default(source: Path, tmp_path: Path) -> None:
    (source / "old").write_bytes(b"x" * 10)
    with embedded_server(source, tmp_path / "state", block_size=4) as running, WireClient(running.master_target) as c:
        assert len(c.stat(b"/old").blockIds) == 3
    (source / "new").write_bytes(b"x" * 10)
    with embedded_server(source, tmp_path / "state", block_size=5) as running, WireClient(running.master_target) as c:
        assert len(c.stat(b"/old").blockIds) == 3
        assert len(c.stat(b"/new").blockIds) == 2


@pytest.mark.parametrize("link", [True, False], ids=["links", "copies"])
def test_blocks_survive_a_restart_unless_they_are_stale(source: Path, tmp_path: Path, link: bool) -> None:
    for name in ("same", "changed", "replaced"):
        (source / name).write_bytes(b"old")
    state = tmp_path / "state"
    with (
        embedded_server(source, state, link_blocks=link) as running,
        WireClient(running.master_target) as client,
        WireClient(running.worker_targets[0]) as worker,
    ):
        infos = {info.name: info for info in client.entries(b"/")}
        for info in infos.values():
            worker.read(read_request(info))
        folder = running.tier_folders[0] / "alluxioworker"
    (source / "changed").write_bytes(b"new content, other length")
    other = tmp_path / "other"
    other.write_bytes(b"new")
    os.replace(other, source / "replaced")
    (folder / ".tmp_blocks" / "7-99").write_bytes(b"torn")
    (folder / "99").write_bytes(b"of nobody")
    with (
        embedded_server(source, state, link_blocks=link) as running,
        WireClient(running.worker_targets[0]) as worker,
    ):
        kept = set(running.blocks[0].block_ids())
        # A copy does not notice a change of its source; a link of a file written in place holds the new bytes.
        expected = {infos[name].blockIds[0] for name in (b"same", b"replaced")}
        assert kept == (expected if link else expected | {infos[b"changed"].blockIds[0]})
        assert {path.name for path in folder.iterdir()} == {str(block) for block in kept} | {".tmp_blocks"}
        assert list((folder / ".tmp_blocks").iterdir()) == []
        assert b"".join(worker.read(read_request(infos[b"same"], from_ufs=False))) == b"old"
        assert b"".join(worker.read(read_request(infos[b"replaced"], from_ufs=False))) == b"old"


# -- what it refuses ---------------------------------------------------------------------------------------


def refusal(folder: Path, state: Path, **options: object) -> FusecacheError:
    with pytest.raises(FusecacheError) as failure, embedded_server(folder, state, **options):
        pass
    return failure.value


def test_source_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = refusal(tmp_path / "file", tmp_path / "state")
    assert isinstance(error, UsageError)
    assert "is not a folder" in str(error)
    assert str(tmp_path / "file") in str(error)
    assert not (tmp_path / "state").exists()


def test_source_that_is_missing_is_named(tmp_path: Path) -> None:
    error = refusal(tmp_path / "none", tmp_path / "state")
    assert isinstance(error, UsageError)
    assert str(tmp_path / "none") in str(error)


@pytest.mark.parametrize(
    ("option", "value"), [("auth", "kerberos"), ("block_workers", 0), ("block_workers", 500), ("block_size", 0)]
)
def test_impossible_option_is_named_with_its_value(source: Path, tmp_path: Path, option: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{option} .*{value}"):
        EmbeddedServer(source, tmp_path / "state", **{option: value})  # type: ignore[arg-type]


def test_port_in_use_is_named(source: Path, tmp_path: Path, server: EmbeddedServer) -> None:
    port = int(server.master_target.rpartition(":")[2])
    error = refusal(source, tmp_path / "second", port=port)
    assert isinstance(error, UsageError)
    assert str(port) in str(error)


def test_state_folder_is_private(source: Path, tmp_path: Path) -> None:
    state = tmp_path / "deep" / "state"
    with embedded_server(source, state):
        assert state.stat().st_mode & 0o777 == 0o700


def test_state_folder_that_is_a_link_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "real")
    error = refusal(source, tmp_path / "state")
    assert isinstance(error, StateError)
    assert "symbolic link" in str(error)


def test_state_folder_that_others_may_enter_is_refused_with_its_mode(source: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o750)
    error = refusal(source, tmp_path / "state")
    assert isinstance(error, StateError)
    assert "0750" in str(error)


def test_state_folder_of_somebody_else_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    error = refusal(source, tmp_path / "state")
    assert isinstance(error, StateError)
    assert "12345" in str(error)


def test_state_folder_in_use_is_refused(source: Path, tmp_path: Path, server: EmbeddedServer) -> None:
    error = refusal(source, tmp_path / "state")
    assert isinstance(error, StateError)
    assert "in use" in str(error)


def test_state_folder_of_another_source_is_refused(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with embedded_server(source, tmp_path / "state"):
        pass
    error = refusal(other, tmp_path / "state")
    assert isinstance(error, StateError)
    assert str(source) in str(error)


def test_state_folders_of_two_sources_differ_and_of_one_agree(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    base = tmp_path / "base"
    assert state_folder_for(base, tmp_path / "a") == state_folder_for(base, tmp_path / "link")
    assert state_folder_for(base, tmp_path / "a") != state_folder_for(base, tmp_path)


def test_stop_ends_calls_that_wait(source: Path, tmp_path: Path) -> None:
    running = EmbeddedServer(source, tmp_path / "state")
    running.start()
    with WireClient(running.master_target) as client:
        running.stop()
        running.stop()
        with pytest.raises(grpc.RpcError) as failure:
            client.files.GetStatus(GetStatusPRequest(path=b"/"), metadata=client.metadata)
    assert code(failure) == grpc.StatusCode.UNAVAILABLE


def test_started_again_it_listens_on_the_same_ports_and_knows_no_channel(source: Path, tmp_path: Path) -> None:
    running = EmbeddedServer(source, tmp_path / "state", block_workers=2)
    running.start()
    targets = (running.master_target, *running.worker_targets)
    with WireClient(running.master_target) as client:
        assert client.stat(b"/").folder
        running.stop()
        running.start()
        try:
            assert (running.master_target, *running.worker_targets) == targets
            with pytest.raises(grpc.RpcError) as failure:
                client.files.GetStatus(
                    GetStatusPRequest(path=b"/"), metadata=client.metadata, wait_for_ready=True, timeout=20
                )
            assert code(failure) == grpc.StatusCode.UNAUTHENTICATED
            with WireClient(running.master_target) as again:
                assert again.stat(b"/").folder
        finally:
            running.stop()
