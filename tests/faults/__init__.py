"""Faults and abuse: the network, the cluster and the data misbehave; what may be seen of it through the handlers.

One file per scenario. Each test first proves that its fault happened, then looks at bytes, errno, time and recovery.
Everything runs over the embedded server, without the kernel (tests/support/below_kernel.py).
"""
