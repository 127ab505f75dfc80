"""The previous release and this version on one database: upgrade and rollback under load."""
