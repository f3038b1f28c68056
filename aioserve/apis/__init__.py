"""HTTP APIs beside OpenAI's completions and chat: each folder is one of them."""
