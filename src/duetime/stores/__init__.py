"""The databases behind the store port, one module each."""
