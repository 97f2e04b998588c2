"""The cluster side of co-scheduling: takes the nodes' reports, places gated pods where their data is.

    model        pods and nodes as projections of the API's raw JSON; quantities (pure)
    reports      what nodes said, validated, with its age (pure)
    inventory    who holds how much of which data set (pure)
    feasibility  may this pod run there (pure)
    planner      the best node for a pod, and why (pure)
    verdict      place, release or wait (pure)
    decision     what is written: annotation, event, patches (pure)
    election     who leads (pure)
    kube         the Kubernetes API; the only importer of its client
    mirror       pods and nodes in memory, listed once, then watched
    lease        holds the Lease
    reconcile    the loop: look, decide, write
    server       the gRPC service that nodes report to and people ask
    main         wires these together

Everything but the pure modules runs on one asyncio loop. The image needs neither pyfuse3 nor trio.
"""
