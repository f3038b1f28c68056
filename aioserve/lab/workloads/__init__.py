"""Traffic as plain data, and where it comes from. Knows no clock and no policy."""
