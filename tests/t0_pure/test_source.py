"""SOURCE arguments: three forms, and one line that names what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.config.source import (
    AlluxioSource,
    ClusterSource,
    FolderSource,
    check_folder,
    parse_host_port,
    parse_source,
)
from fusecache.errors import UsageError


@pytest.mark.parametrize(
    ("text", "masters", "path"),
    [
        ("alluxio://m1:19998/imagenet", ("m1:19998",), b"/imagenet"),
        ("alluxio://m1:19998,m2:20000/a/b", ("m1:19998", "m2:20000"), b"/a/b"),
        ("alluxio://m1/a", ("m1:19998",), b"/a"),
        ("ALLUXIO://m1/a", ("m1:19998",), b"/a"),
        ("alluxio://m1:19998/", ("m1:19998",), b"/"),
        ("alluxio://m1:19998//a//b/", ("m1:19998",), b"/a/b"),
        ("alluxio://[::1]:19998/a", ("[::1]:19998",), b"/a"),
        ("alluxio://[fe80::1]/a", ("[fe80::1]:19998",), b"/a"),
        ("alluxio://10.0.0.1:1/a b:c", ("10.0.0.1:1",), b"/a b:c"),
    ],
)
def test_parse_source_url_gives_masters_and_path(text: str, masters: tuple[str, ...], path: bytes) -> None:
    assert parse_source(text) == AlluxioSource(masters, path)


def test_parse_source_name_that_is_not_utf8_is_kept_byte_for_byte() -> None:
    source = parse_source("alluxio://m1/" + os.fsdecode(b"caf\xe9"))
    assert source == AlluxioSource(("m1:19998",), b"/caf\xe9")


@pytest.mark.parametrize(
    ("text", "cluster", "path"),
    [("train:/imagenet", "train", b"/imagenet"), ("a.b-c_1:/", "a.b-c_1", b"/"), ("t:/a:/b", "t", b"/a:/b")],
)
def test_parse_source_cluster_gives_name_and_path(text: str, cluster: str, path: bytes) -> None:
    assert parse_source(text) == ClusterSource(cluster, path)


@pytest.mark.parametrize(("text", "folder"), [("/data", "/data"), ("/a/../b/", "/b"), ("/with:colon", "/with:colon")])
def test_parse_source_absolute_path_is_a_folder(text: str, folder: str) -> None:
    assert parse_source(text) == FolderSource(Path(folder))


@pytest.mark.parametrize("text", ["photos", "./photos", "./a:/b"])
def test_parse_source_relative_path_is_a_folder_below_here(text: str) -> None:
    assert parse_source(text) == FolderSource(Path(os.path.abspath(text)))


@pytest.mark.parametrize(
    ("text", "named", "advice"),
    [
        ("", "empty", "write alluxio://"),
        ("hdfs://nn/data", "'hdfs'", "write alluxio://"),
        ("http://m1:19998/a", "'http'", "write alluxio://"),
        ("alluxio://", "alluxio://", "names no master"),
        ("alluxio:///imagenet", "alluxio:///imagenet", "names no master"),
        ("alluxio://m1:19998", "alluxio://m1:19998", "write alluxio://m1:19998/ "),
        ("alluxio://m1:0/a", "'0'", "1 to 65535"),
        ("alluxio://m1:99999/a", "'99999'", "1 to 65535"),
        ("alluxio://m1:port/a", "'port'", "1 to 65535"),
        ("alluxio://m1:/a", "''", "1 to 65535"),
        ("alluxio://m1,,m2/a", "m1,,m2", "single commas"),
        ("alluxio://m 1/a", "'m 1'", "HOST:PORT"),
        ("alluxio://zk@z1:2181/a", "'zk@'", "--user"),
        ("alluxio://user:secret@m1/a", "user:secret@", "--user"),
        ("alluxio://[::1/a", "'[::1'", "IPv6"),
        ("alluxio://m1/a/../b", "'..'", "without"),
        ("alluxio://m1/./b", "'.'", "without"),
        ("train:", "train:", "write train:/ "),
        ("a\0b", "a\\x00b", "NUL"),
    ],
)
def test_parse_source_wrong_text_is_one_line_with_value_and_advice(text: str, named: str, advice: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_source(text)
    line = str(caught.value)
    assert named in line
    assert advice in line
    assert "\n" not in line


@given(st.text(max_size=40))
def test_parse_source_any_text_is_a_source_or_a_usage_error(text: str) -> None:
    try:
        source = parse_source(text)
    except UsageError:
        return
    if not isinstance(source, FolderSource):
        assert source.path.startswith(b"/")
        assert b"//" not in source.path


@pytest.mark.parametrize(
    ("text", "expected"),
    [("m1", ("m1", 19998)), ("m1:1", ("m1", 1)), ("[::1]:2", ("::1", 2)), ("[::1]", ("::1", 19998))],
)
def test_parse_host_port_known_forms(text: str, expected: tuple[str, int]) -> None:
    assert parse_host_port(text) == expected


@pytest.mark.parametrize("text", ["", ":1", "a:b:1", "::1", "-a:1", "m1:65536", "[::1]x:1", "m1:0"])
def test_parse_host_port_wrong_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_host_port(text)


def test_parse_host_port_without_default_needs_the_port() -> None:
    with pytest.raises(ValueError, match="no port"):
        parse_host_port("m1", default_port=None)


def test_check_folder_readable_folder_passes(tmp_path: Path) -> None:
    check_folder(tmp_path)


def test_check_folder_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(b"x")
    with pytest.raises(UsageError, match=r"photo\.jpg' is not a folder"):
        check_folder(file)


def test_check_folder_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere' does not exist"):
        check_folder(tmp_path / "nowhere")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_check_folder_unreadable_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    with pytest.raises(UsageError, match="closed' is not readable"):
        check_folder(closed)
