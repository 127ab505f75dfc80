"""The version of the server. The client has its own: it is a distribution of its own (docs/decisions/0039)."""

__version__ = "0.1.0"
