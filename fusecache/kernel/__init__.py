"""Between the kernel's /dev/fuse and pyfuse3: a supervisor that mounts and restarts, a gate that hands requests out.

`supervisor` owns the device and the mount and starts every part; `gate` reads requests and hands them to workers, and
outlives them. The modules here are what both of them, or they and the rest of the daemon, agree on: `wire` and
`init_message` (the kernel's messages), `device`, `features` and `probe` (what a kernel can do), `reply_slots` and
`offers` (between a worker and the gate), `gate_link` (between agent and gate), `spec` and `channel` (what a supervisor
and its parts are told). All of it runs on the standard library: it must not die of what it imports, and it stays small.
"""
