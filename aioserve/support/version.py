"""The version of this package. Here, so that its modules need not import the package for it."""

__version__ = "0.2.0"
