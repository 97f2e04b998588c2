"""Measurements of single parts, without a mount or a cluster."""
