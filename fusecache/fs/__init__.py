"""FUSE semantics: what each request of the kernel is answered. The only importer of pyfuse3."""
