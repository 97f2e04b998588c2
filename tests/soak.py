"""Long runs that no everyday test run has time for: `python -m tests.soak --help`.

    python -m tests.soak --kills 200 --open-mode no-open
    python -m tests.soak --kills 200 --open-mode passthrough

mounts a folder, lets eight processes read and check it, kills workers by chance, and prints what the readers saw:
errors, wrong bytes, and for each kill the longest pause. Exit code 1 when there was an error or another byte.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.support.kills import distribution, kill_workers, pauses
from tests.support.readers import Load
from tests.t4_mount.board import Board, Place
from tests.t4_mount.modes import MODES, OpenMode

SIZES = (0, 1, 4095, 4096, 4097, 20_000, 70_000, 110_000, 300_000, 3_000_000, 20_000_000)
FILES_OF_EACH = 8
SHOWN_ERRORS = 10


def soak(mode: OpenMode, folder: Path, *, kills: int, readers: int, features: str, seed: int) -> bool:
    """One run; True when nobody saw anything but pauses."""
    rng = random.Random(seed)
    with Board(mode, folder) as board:
        source = board.new_source("soak")
        names = [f"f{number}-{size}" for number in range(FILES_OF_EACH) for size in SIZES]
        for name in names:
            (source / name).write_bytes(rng.randbytes(int(name.partition("-")[2])))
        flags = (f"--kernel-features={features}",) if features else ()
        with board.own(source, folder, *flags) as mount:
            place = Place(mount, source, mount.root, max(SIZES) if mode.passthrough else 0)
            place.warm(*names[: len(names) // 2])
            restarts_before = sum(part.restarts for part in mount.parts().values())
            began_s = time.monotonic()
            with Load(mount.root, source, names, processes=readers, seed=seed) as load:
                done = kill_workers(mount, load, kills, rng)
                report = load.stop()
            took_s = time.monotonic() - began_s
            restarts = sum(part.restarts for part in mount.parts().values()) - restarts_before
            gate = mount.gate()
    print(
        f"{mode.name}, features {features or 'all'}, seed {seed}: "
        f"{len(done)} kills in {took_s:.0f} s, {readers} readers"
    )
    print(f"  {report.describe()}")
    print(f"  restarts {restarts}, requests delivered again {gate['redelivered']}, opens {gate.get('opens', {})}")
    print(f"  a worker was back after: {distribution([killed.back_s for killed in done])}")
    print(f"  longest call at a kill:  {distribution(pauses(report, done))}")
    for text in [*report.errors, *report.wrong][:SHOWN_ERRORS]:
        print(f"  {text}")
    right = not report.errors and not report.wrong and all(report.calls) and restarts == len(done) == kills
    print("  nobody saw anything but pauses" if right else "  FAILED")
    return right


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description="Kill workers while eight processes read."
    )
    parser.add_argument("--kills", type=int, default=200, help="how many (default 200)")
    parser.add_argument(
        "--open-mode", choices=[name for name, mode in MODES.items() if name != "classic"], required=True
    )
    parser.add_argument("--kernel-features", default="-resend", help="masked features (default -resend; '' for none)")
    parser.add_argument("--readers", type=int, default=8, help="reader processes (default 8)")
    parser.add_argument("--seed", type=int, default=1, help="of contents, moments and victims (default 1)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fusecache-soak-") as folder:
        right = soak(
            MODES[chosen.open_mode],
            Path(folder),
            kills=chosen.kills,
            readers=chosen.readers,
            features=chosen.kernel_features,
            seed=chosen.seed,
        )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
