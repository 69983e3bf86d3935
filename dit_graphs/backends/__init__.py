"""Backends: how one forward is recorded and replayed."""
