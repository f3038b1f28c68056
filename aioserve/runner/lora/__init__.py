"""LoRA adapters in the runner: which rows have which, and the layers that add them."""
