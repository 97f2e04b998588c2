"""Joins what is remembered with what can be fetched: the bytes of a read, from the nearest source that has them."""
