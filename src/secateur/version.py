"""The version, for the package, the command line and the pages."""

__version__ = "0.1.0"
