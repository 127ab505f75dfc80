"""Faults on a cluster under load: instances are killed, stopped and restarted, the database goes away, answers get
lost, clocks jump; and what clients were promised is held against what the receiver got.

``python -m tests.chaos --help`` says how to run it. ``ledger`` is what was promised and what came, ``checker`` compares
the two, ``cluster`` runs the processes, ``load`` is the clients, and ``scenarios`` are the faults, one function each.
"""
