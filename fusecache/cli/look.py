"""`fusecache ls` and `fusecache stat`: a path as Alluxio sees it. Nothing is mounted and nothing is changed."""

from __future__ import annotations

import json
import stat as stat_bits
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from fusecache.cli.options import Common, as_text, cluster_flags, everywhere, print_json, setting_flags
from fusecache.cli.tables import print_table

if TYPE_CHECKING:
    from fusecache.alluxio.model import FileStatus

SYNC_HELP = "Let Alluxio compare with the under storage first; else it answers with what it knows."
MAX_BLOCKS_SHOWN = 1000
"""Rows of the table of blocks; --json shows all."""

NEVER_MS = -1
AT_ONCE_MS = 0


@click.command(short_help="List a path as Alluxio sees it: blocks, locations, percent.")
@click.argument("source")
@click.option("--sync", is_flag=True, help=SYNC_HELP)
@setting_flags(("state_dir", "runtime_dir"))
@cluster_flags
@everywhere
def ls(source: str, sync: bool, common: Common, flags: dict[str, Any]) -> None:
    """List SOURCE: mode, owner, group, length, percent of the bytes in Alluxio, blocks, time of change, name.

    SOURCE as for `mount`. Entries are printed as they arrive, in Alluxio's order; --json prints an object a line.

    \b
    Examples:
      fusecache ls alluxio://m1:19998/imagenet/train
      fusecache ls alluxio://m1:19998/imagenet --json | jq -r 'select(.in_alluxio_percent < 100).path'
    """
    from fusecache.config.units import approximate_size
    from fusecache.daemon.cluster_access import open_cluster

    common.quiet_logs()
    configuration = common.configuration(flags)
    cluster, folder, path = configuration.resolve(source)
    sync_interval_ms = AT_ONCE_MS if sync else NEVER_MS
    with open_cluster(cluster, folder, configuration.settings) as access:
        status = access.client.get_status(path, sync_interval_ms=sync_interval_ms, budget=access.budget())
        entries: Iterator[list[FileStatus]] = iter([[status]])
        if status.folder:
            entries = access.client.list_status(path, sync_interval_ms=sync_interval_ms, budget=access.budget())
        for batch in entries:
            for entry in batch:
                if common.as_json:
                    click.echo(json.dumps(described(entry)))
                    continue
                cached = cached_bytes(entry)
                percent = "-" if entry.folder else f"{percent_of(cached, entry.length):.0f} %"
                size = "-" if entry.folder else approximate_size(entry.length)
                blocks = "-" if entry.folder else str(entry.block_count)
                click.echo(
                    f"{stat_bits.filemode(full_mode(entry))} {as_text(entry.owner):<10} {as_text(entry.group):<10} "
                    f"{size:>9} {percent:>6} {blocks:>4} {time_text(entry.mtime_ms)} {shown_name(entry)}"
                )


@click.command("stat", short_help="Show one file or folder as Alluxio sees it.")
@click.argument("source")
@click.option("--sync", is_flag=True, help=SYNC_HELP)
@setting_flags(("state_dir", "runtime_dir"))
@cluster_flags
@everywhere
def stat(source: str, sync: bool, common: Common, flags: dict[str, Any]) -> None:
    """Show SOURCE with every block and the block workers that hold it.

    \b
    Examples:
      fusecache stat alluxio://m1:19998/imagenet/train/n01440764/x.jpg
      fusecache stat --json train:/imagenet --config cluster.yaml
    """
    from fusecache.alluxio.model import block_id_of
    from fusecache.daemon.cluster_access import open_cluster

    common.quiet_logs()
    configuration = common.configuration(flags)
    cluster, folder, path = configuration.resolve(source)
    with open_cluster(cluster, folder, configuration.settings) as access:
        status = access.client.get_status(
            path, sync_interval_ms=AT_ONCE_MS if sync else NEVER_MS, budget=access.budget()
        )
        holders = {worker for block in status.locations for worker in block}
        names: dict[int, str] = {}
        if holders:
            workers = access.client.block_workers(access.budget())
            names = {worker.worker_id: worker.address.target for worker in workers}
    blocks = [
        {
            "index": index,
            "block_id": block_id_of(status.file_id, index),
            "length_bytes": block_length(status, index),
            "block_workers": [names.get(worker, f"gone ({worker})") for worker in locations_of(status, index)],
        }
        for index in range(status.block_count)
    ]
    if common.as_json:
        print_json({**described(status), "cluster_id": access.identity.cluster_id, "blocks": blocks})
        return
    for key, value in described(status).items():
        click.echo(f"{key.replace('_', ' '):<20} {value}")
    click.echo(f"{'cluster id':<20} {access.identity.cluster_id}")
    if blocks:
        rows = [
            (
                *(str(block[key]) for key in ("index", "block_id", "length_bytes")),
                ", ".join(block["block_workers"]) or "nobody",  # type: ignore[arg-type]
            )
            for block in blocks[:MAX_BLOCKS_SHOWN]
        ]
        print_table(("block", "id", "bytes", "held by"), rows)
        if len(blocks) > MAX_BLOCKS_SHOWN:
            click.echo(f"{len(blocks) - MAX_BLOCKS_SHOWN} more; --json shows all")


def described(status: FileStatus) -> dict[str, Any]:
    """A status for people and programs; names that are no UTF-8 with \\xff."""
    common_part = {
        "path": as_text(status.path),
        "kind": "folder" if status.folder else "file",
        "file_id": status.file_id,
        "mode": f"{status.mode:04o}",
        "owner": as_text(status.owner),
        "group": as_text(status.group),
        "changed": time_text(status.mtime_ms),
        "mtime_ms": status.mtime_ms,
        "under_storage_path": as_text(status.ufs_path),
    }
    if status.folder:
        return {**common_part, "mount_point": status.mount_point}
    cached = cached_bytes(status)
    return {
        **common_part,
        "length_bytes": status.length,
        "in_alluxio_bytes": cached,
        "in_alluxio_percent": round(percent_of(cached, status.length), 1),
        "block_size_bytes": status.block_size,
        "block_count": status.block_count,
        "completed": status.completed,
        "persisted": status.persisted,
    }


def cached_bytes(status: FileStatus) -> int:
    """Bytes of the file in blocks that at least one block worker holds."""
    return sum(block_length(status, index) for index in range(status.block_count) if locations_of(status, index))


def block_length(status: FileStatus, index: int) -> int:
    """Bytes of block `index`; the last one is shorter."""
    return min(status.block_size, status.length - index * status.block_size)


def locations_of(status: FileStatus, index: int) -> tuple[int, ...]:
    """Ids of the block workers that hold block `index`."""
    return status.locations[index] if index < len(status.locations) else ()


def percent_of(part: int, whole: int) -> float:
    """An empty file is wholly there."""
    return 100.0 * part / whole if whole else 100.0


def full_mode(status: FileStatus) -> int:
    """Permission bits with the kind of file, for `filemode`."""
    return status.mode | (stat_bits.S_IFDIR if status.folder else stat_bits.S_IFREG)


def time_text(mtime_ms: int) -> str:
    """UTC to the second; whatever can't be a date is shown as the number it is."""
    try:
        return datetime.fromtimestamp(mtime_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return f"{mtime_ms} ms"


def shown_name(status: FileStatus) -> str:
    """Control characters of a name must not reach the terminal."""
    name = as_text(status.name) or "/"
    shown = "".join(character if character.isprintable() else f"\\x{ord(character):02x}" for character in name)
    return shown + ("/" if status.folder and status.name else "")
