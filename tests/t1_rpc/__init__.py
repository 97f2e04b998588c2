"""Level 1: RPCs over real sockets."""
