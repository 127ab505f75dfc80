"""The embedded store: timers in one SQLite file."""
