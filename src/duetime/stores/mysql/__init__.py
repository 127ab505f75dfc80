"""The MySQL store, for MySQL 8+, MariaDB 10.11+ and TiDB, and any number of instances."""
