"""Tests, in levels that run bottom-up; see conftest.py."""
