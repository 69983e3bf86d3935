"""Makes the backend fixtures known to this folder; they live in tests/support/where.py."""

from where import breaking, graphing, pooled, segmenting, where

__all__ = ["breaking", "graphing", "pooled", "segmenting", "where"]
