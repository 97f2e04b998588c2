"""What is remembered about the tree: metadata over LMDB, kept fresh by listing folders again."""
