"""The version of this package, which its modules, its commands and its files name."""

__version__ = "0.1.0"
