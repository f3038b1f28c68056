"""Routers that ship: each chooses a replica for a request; `BRINGS` of the fleet names them."""
