"""Models as GGUF files, which llama.cpp writes: configuration, tokenizer and weights in one."""
