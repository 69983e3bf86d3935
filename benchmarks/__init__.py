"""Measurements: full-size models, one protocol, result files that can be checked."""
