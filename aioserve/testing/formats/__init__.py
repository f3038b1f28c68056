"""The contract of reply formats: how a format is read, what it is given, what must be true.

`aioserve.testing.formats.contract` has the tests; authors derive `FormatContract` from there.
"""
