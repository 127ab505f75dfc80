"""The last release and this version on one database: upgraded and rolled back under load, and what came of it."""
