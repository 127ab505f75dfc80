"""The version of the client, which each request reports in its ``User-Agent``."""

__version__ = "0.1.0"
