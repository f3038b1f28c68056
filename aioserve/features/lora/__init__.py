"""LoRA adapters: read from PEFT directories, loaded and unloaded, added to products row by row."""
