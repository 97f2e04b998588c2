"""What several tests need: clusters, mounts, checks. Imports no private part of fusecache."""
