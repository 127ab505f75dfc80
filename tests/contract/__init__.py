"""The conformance suite of the store port: every store in ``stores.STORES`` passes every test that asks for ``store``.

A new store adds one line to that table. The files are the themes of the contract in ``duetime/store.py``; what only
SQLite promises has files of its own, ``test_sqlite_*``.
"""
