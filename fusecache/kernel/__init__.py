"""Between the kernel's /dev/fuse and pyfuse3: a supervisor that mounts and restarts, a gate that hands requests out.

`supervisor` owns the device and the mount and starts every part; `gate` reads requests and hands them to workers, and
outlives them. `takeover` is how a mount goes to another supervisor. All of it runs on the standard library: it must not
die of what it imports, and it stays small.
"""
