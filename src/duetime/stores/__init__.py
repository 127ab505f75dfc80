"""Implementations of the store port, one package or module per database."""
