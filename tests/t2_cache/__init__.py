"""Level 2: the metadata cache over LMDB."""
