"""The conformance suite of the store port: every store in ``stores.STORES`` passes every test that uses ``store``.

A new store adds one entry to that table. Each file tests one subject of the contract in ``duetime/store``; guarantees
of one database only have files of their own, such as ``test_sqlite_*``.
"""
