"""The pipeline's language model: prompts encoded, continued and rewritten from graphs.

Owns what transformers models need of `dit_graphs.llm`. Must never know denoisers. The surprising
fact: the same module is called both ways, and a pass of a decode must not count as an encode.
"""
