"""`compare`, `search` and `sweep`: what happened as numbers, and how sure differences are."""
