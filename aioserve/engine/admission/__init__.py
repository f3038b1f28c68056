"""From a prompt to a request that the scheduler has: limits, templates, tokens, grammars."""
