"""CUDA graphs for diffusers pipelines: same pixels, no compiler, memory under a budget."""
