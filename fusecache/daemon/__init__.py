"""Processes of a node: one mount from the command line to the kernel, and many mounts of one file."""
