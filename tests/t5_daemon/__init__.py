"""Level 5: whole daemons: signals, death, restart."""
