"""`bench`: any OpenAI-compatible server under load, over HTTP."""
