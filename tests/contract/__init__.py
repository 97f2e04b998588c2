"""What Alluxio promises a client: run unchanged against the embedded server and against real Alluxio servers.

The embedded server by default; real ones with FUSECACHE_TEST_CLUSTER=real (make test-real). Where the two differ, the
embedded server is wrong. Not here: names that real servers can't serve (`?`, backslash, not UTF-8).
"""
