"""Code that the SQL stores share; each database is a package beside this one."""
