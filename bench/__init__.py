"""Measures a real ``duetime serve`` against raw ceilings and its peers: ``python -m bench``.

Absolute numbers of a shared machine mean little, so all measurements take turns in rounds of one run, and the verdicts
use the median of the rounds' ratios. A measurement is a module with its parts and tables; ``__main__`` runs them in
turn, ``results`` is the file of raw figures, and ``report`` creates the document from it. Everything runs on loopback.
"""
