"""Whole stacks against real Alluxio servers; run by make test-real."""
