"""Duetime: durable timers that call you back."""

__version__ = "0.1.0"
