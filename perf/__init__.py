"""Benchmarks: what is measured (workloads), on what (systems, dataset), how it is judged (statistics, report)."""
