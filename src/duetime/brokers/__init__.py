"""The brokers: one adapter each, behind the port in ``duetime.broker``."""
