"""The zoo: policies as papers and other engines have them, one per file, found by their names."""
