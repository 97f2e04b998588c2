"""Processes of a node: what is started, watched and ended, and how the parts are wired together."""
