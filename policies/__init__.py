"""The scheduling policies that come with aioserve, one decision per file."""
