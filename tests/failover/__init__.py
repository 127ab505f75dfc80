"""Failovers of a cluster under load: the primary of its database dies, and the standby is promoted.

``python -m tests.failover --help`` shows how to run it. ``pairs`` has the servers and ``scenarios`` the faults; the
rest is shared with ``tests/chaos``.
"""
