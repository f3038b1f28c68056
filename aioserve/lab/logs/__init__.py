"""`replay` and `trace`: what a decision log says, and what another policy would have done."""
