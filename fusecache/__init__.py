"""fusecache: a fast, read-only FUSE view of Alluxio for training jobs."""

__version__ = "0.1.0"
