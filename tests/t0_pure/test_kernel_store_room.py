"""Pages are pushed only while there is memory for them, whatever cgroups look like."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusecache.kernel.gate.store_room import LOOK_EVERY_S, Memory, StoreRoom, has_room

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (None, True),
        (Memory(4 * GIB, 3 * GIB), True),
        (Memory(4 * GIB, 3 * GIB + 1), False),
        (Memory(4 * GIB, 5 * GIB), False),
        (Memory(4 * GIB, 0), True),
    ],
)
def test_a_quarter_must_be_free(memory: Memory | None, expected: bool) -> None:
    assert has_room(memory) is expected


def machine(root: Path, cgroup: str, **files: str) -> StoreRoom:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n")
    for name, content in files.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return StoreRoom(lambda: 0.0, root)


def test_the_limit_of_a_cgroup_of_version_2_counts(tmp_path: Path) -> None:
    room = machine(
        tmp_path,
        "0::/pod/gate\n",
        pod__gate__memory_DOT_max=f"{GIB}\n",
        pod__gate__memory_DOT_current="1000\n",
        pod__gate__memory_DOT_stat="anon 1\ninactive_file 300\n",
    )
    assert room.memory() == Memory(GIB, 700)


def test_the_limit_of_a_cgroup_of_version_1_counts(tmp_path: Path) -> None:
    room = machine(
        tmp_path,
        "5:cpu,cpuacct:/\n4:memory:/pod\n",
        memory__pod__memory_DOT_limit_in_bytes=f"{GIB}\n",
        memory__pod__memory_DOT_usage_in_bytes="1000\n",
        memory__pod__memory_DOT_stat="total_inactive_file 2000\n",
    )
    assert room.memory() == Memory(GIB, 0)


def test_a_path_of_the_host_is_looked_for_at_the_top(tmp_path: Path) -> None:
    room = machine(tmp_path, "0::/host/pod\n", memory_DOT_max=f"{GIB}\n", memory_DOT_current="5\n")
    assert room.memory() == Memory(GIB, 5)


@pytest.mark.parametrize("limit", ["max\n", "9223372036854771712\n"])
def test_without_a_limit_the_machine_counts(tmp_path: Path, limit: str) -> None:
    room = machine(tmp_path, "0::/\n", memory_DOT_max=limit, memory_DOT_current="5\n")
    assert room.memory() == Memory(8 * GIB, 2 * GIB)


def test_where_nothing_can_be_read_nothing_is_refused(tmp_path: Path) -> None:
    room = StoreRoom(lambda: 0.0, tmp_path)
    assert room.memory() is None
    assert room.has_room()


def test_it_looks_again_after_a_while_only(tmp_path: Path) -> None:
    now_s = [100.0]
    machine(tmp_path, "0::/\n", memory_DOT_max=f"{GIB}\n", memory_DOT_current="5\n")
    room = StoreRoom(lambda: now_s[0], tmp_path)
    assert room.has_room()
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(f"{GIB}\n")
    assert room.has_room()
    now_s[0] += LOOK_EVERY_S
    assert not room.has_room()
