"""The process between the kernel and the workers: reads requests, gives them to workers, writes the answers. Standard
library only, and no network.

    main            the loop: what is read, what is answered at once, what the supervisor orders
    dispatch        to the workers and back; `in_flight` decides, `worker` is the gate's end of one of them
    opens           OPEN and RELEASE in passthrough mode, on `open_table` and `backing`
    direct_reads    READs without a worker, from files that `learned` knows (by `quiet_stat`) and that are `resident`
    notifications   what the agent has the kernel told, if there is a `store_room` for it
    carried         what a gate that is replaced leaves to the next one
"""
