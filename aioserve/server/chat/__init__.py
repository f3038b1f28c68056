"""Chat completions, and what all routes of conversations share: tools, schemas, replies read."""
