"""The fast tier: models with the structure of Llama, run through our own loop on fused weights."""
