"""gRPC as this project uses it: channels, budgets and retries, TLS. Knows no Alluxio message."""
