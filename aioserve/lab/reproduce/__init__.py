"""Published results predicted from other measurements of the same machine."""
