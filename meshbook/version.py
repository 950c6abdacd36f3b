"""The version of Meshbook, importable from every layer."""

__version__ = "0.1.0"
