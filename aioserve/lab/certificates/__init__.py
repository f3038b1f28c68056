"""Certificates of policies: contract, cost and standing of one file, for papers and galleries."""
