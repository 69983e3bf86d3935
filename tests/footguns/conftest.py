"""Makes the backend fixtures known to this folder; they live in tests/support/where.py."""

from where import breaking, graphing, segmenting, where

__all__ = ["breaking", "graphing", "segmenting", "where"]
