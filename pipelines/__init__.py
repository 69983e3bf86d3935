"""The diffusers and transformers side: what a pipeline is and where its modules are."""
