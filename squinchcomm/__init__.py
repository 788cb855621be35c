"""Collectives whose gradient traffic is compressed to 6 bits an element."""

__version__ = "0.1.0"
