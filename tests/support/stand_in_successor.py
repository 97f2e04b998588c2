"""A successor without a mount (`takeover.reloading`): does what a test orders it to, in the folder FUSECACHE_STAND_IN.

It is the n-th one that runs there, and writes its process id to `n`. Orders are files: `n ready` makes it say so;
`n exit CODE` makes it end, without a word if it was not ready. SIGTERM is noted in `n asked` and ends it with 0, unless
there is `n stays`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

POLL_S = 0.01


def main() -> int:
    folder = Path(os.environ["FUSECACHE_STAND_IN"])
    ready_fd = int(sys.argv[sys.argv.index("--ready-fd") + 1])
    number = 1
    while (folder / str(number)).exists():
        number += 1
    asked = folder / f"{number} asked"
    signal.signal(signal.SIGTERM, lambda *_: asked.touch())
    (folder / f"{number} pid").write_text(str(os.getpid()))
    (folder / f"{number} pid").rename(folder / str(number))
    is_ready = False
    while True:
        if not is_ready and (folder / f"{number} ready").exists():
            is_ready = True
            os.write(ready_fd, b"ready\n")
        for order in folder.glob(f"{number} exit *"):
            return int(order.name.split()[-1])
        if asked.exists() and not (folder / f"{number} stays").exists():
            return 0
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
