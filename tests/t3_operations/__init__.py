"""Level 3: file system operations without the kernel."""
