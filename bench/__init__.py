"""Measures throughput and lateness of a real ``duetime serve`` beside raw ceilings: ``python -m bench``.

Absolute numbers of a shared machine mean little, so each figure is taken in rounds that alternate with its ceiling,
and what is judged is the median of the rounds' ratios. Everything runs on loopback and in one temporary directory.
"""
