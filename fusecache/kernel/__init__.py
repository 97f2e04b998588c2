"""Between the kernel's /dev/fuse and pyfuse3: a supervisor that mounts and restarts, a gate that hands requests out.

`supervisor` owns the device and the mount and starts every part; `gate` reads requests and hands them to workers, and
outlives them. Both import the standard library only: they must not die of what they import, and they stay small.
"""
