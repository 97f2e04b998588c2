"""Measurements of single parts, and of the settings of a mount from which the defaults are chosen.

    python -m perf.micro.metadata_store     the metadata store at a million files
    python -m perf.micro.read_ahead         --read-ahead-bytes
    python -m perf.micro.background         --max-background and --congestion-threshold
    python -m perf.micro.request_size       --max-read-bytes
    python -m perf.micro.spin               --spin-us, with what it costs an idle mount
    python -m perf.micro.workers            --workers
    python -m perf.micro.privileges         --run-as-user and --run-as-group
    python -m perf.micro.store_push         pushing bytes into the page cache, and the read after it
    python -m perf.micro.stopped_worker     what other reads notice of a worker that is stopped

Those of a mount's settings are runs of the bench (perf/bench.py; its flags apply) whose columns are mounts of ours side
by side, one for each value; each is also compared with the default, in paired rounds.
"""
