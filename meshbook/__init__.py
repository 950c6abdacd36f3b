"""Meshbook: an interactive notebook and REPL environment for distributed PyTorch."""

from __future__ import annotations

__version__ = "0.1.0"
