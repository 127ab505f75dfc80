"""Faults on a cluster under load: instances are killed, stopped and restarted, the database becomes unavailable,
responses get lost, clocks jump. Then the promises to clients are compared with what the receiver got.

``python -m tests.chaos --help`` shows how to run it. ``ledger`` has the promises and the deliveries, ``checker``
compares them, ``cluster`` runs the processes, ``load`` is the clients, and ``scenarios`` has the faults, one function
each.
"""
