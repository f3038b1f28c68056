"""`compare` and `sweep`, and the knee: what happened as numbers, and how sure differences are."""
