"""The command line of msrun."""

__version__ = "0.1.0"
