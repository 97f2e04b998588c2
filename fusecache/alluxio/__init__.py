"""A typed, blocking, thread-safe Alluxio 2.9 client. Knows nothing of FUSE, trio or caches."""
