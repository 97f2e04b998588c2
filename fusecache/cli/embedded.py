"""`fusecache embedded`: the embedded Alluxio-compatible server alone, or as the child of a mount."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusecache.cli.arguments import PathName, Size
from fusecache.cli.options import Common, everywhere, setting_flags
from fusecache.errors import FusecacheError

if TYPE_CHECKING:
    from fusecache.embedded.server import EmbeddedServer


@click.command(short_help="Run the embedded Alluxio-compatible server over a folder.")
@click.argument("folder", type=PathName("dir"))
@click.option("--port", type=click.IntRange(0, 65535), help="Port of the master; 0 = a free one. [default: 19998]")
@click.option(
    "--block-workers", type=click.IntRange(1, 200), default=1, show_default=True, help="How many, on 127.0.0.N."
)
@click.option("--block-size-bytes", type=Size(1, 1 << 60), default="1GiB", show_default=True, help="Bytes per block.")
@click.option(
    "--auth", type=click.Choice(("simple", "nosasl")), default="simple", show_default=True, help="Its scheme."
)
@click.option("--faults", type=PathName(), metavar="FILE", help="Inject the faults of this YAML file (for tests).")
@click.option(
    "--child", is_flag=True, hidden=True, help="Print one JSON line when ready; end when standard input ends."
)
@setting_flags(("state_dir",))
@everywhere
def embedded(
    folder: Path,
    port: int | None,
    block_workers: int,
    block_size_bytes: int,
    auth: str,
    faults: Path | None,
    child: bool,
    common: Common,
    flags: dict[str, Any],
) -> None:
    """Serve FOLDER by Alluxio's wire protocol on this machine only, until a signal ends it.

    Any Alluxio 2.9 client can read from it, fusecache first of all. Blocks are hard links to the files where the state
    folder lies on the same file system, and copies elsewhere. Changes in FOLDER are noticed as Alluxio notices changes
    of its under storage.

    \b
    Examples:
      fusecache embedded ./photos
      fusecache mount alluxio://127.0.0.1:19998/ /mnt/photos
      fusecache embedded ./photos --port 0 --block-workers 3 --block-size-bytes 64MiB --json
    """
    from fusecache import logs
    from fusecache.config.source import DEFAULT_MASTER_PORT, absolute, check_folder

    settings = common.configuration(flags).settings
    logs.configure(settings.log_level, settings.log_format)
    folder = Path(absolute(folder))
    check_folder(folder, "FOLDER")

    from fusecache.embedded.faults import FaultPlan
    from fusecache.embedded.lifetime import Lifetime
    from fusecache.embedded.server import EmbeddedServer
    from fusecache.embedded.state import state_folder_for

    server = EmbeddedServer(
        folder,
        state_folder_for(settings.state_dir if child else settings.state_dir / "embedded", folder),
        port=port if port is not None else 0 if child else DEFAULT_MASTER_PORT,
        block_workers=block_workers,
        block_size=block_size_bytes,
        auth=auth,
        faults=FaultPlan.from_file(faults) if faults else None,
    )
    with Lifetime(child=child) as lifetime, _started(server, child):
        if child or common.as_json:
            ready = {"master": server.master_target, "tier_folders": [str(tier) for tier in server.tier_folders]}
            click.echo(json.dumps(ready))
        else:
            click.echo(f"serving {folder} at alluxio://{server.master_target}/; Ctrl-C ends it")
        lifetime.wait()


@contextmanager
def _started(server: EmbeddedServer, child: bool) -> Iterator[None]:
    """The running server. A child tells a failed start on its one line, for its parent to raise."""
    try:
        server.start()
    except FusecacheError as failure:
        if not child:
            raise
        click.echo(json.dumps({"type": type(failure).__name__, "error": str(failure)}))
        raise click.exceptions.Exit(failure.exit_code) from None
    try:
        yield
    finally:
        server.stop()
