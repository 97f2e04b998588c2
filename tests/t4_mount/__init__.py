"""Level 4: real mounts."""
