"""Owns the language-model runner: slots of keys and values, decode graphs by bucket, sampling.

Must never know transformers or pipelines: a model is anything with the few methods of
`LanguageModel`. The surprising fact: a decode graph has no inputs. It reads and advances its own
state, so that a written token costs two launches and no copy from or to the host.
"""

from __future__ import annotations

from .buckets import BATCH_LADDER, PROMPT_LADDER
from .decode import DecodeRunner, Prompt
from .forward_mode import ForwardMode
from .kv import LayerLayout, SlotCache
from .model import LanguageModel
from .sampling import Sampling

__all__ = [
    "BATCH_LADDER",
    "PROMPT_LADDER",
    "DecodeRunner",
    "ForwardMode",
    "LanguageModel",
    "LayerLayout",
    "Prompt",
    "Sampling",
    "SlotCache",
]
