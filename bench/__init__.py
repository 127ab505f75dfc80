"""Measures a real ``duetime serve`` beside raw ceilings and its peers: ``python -m bench``.

Absolute numbers of a shared machine mean little, so everything takes turns in rounds of one run, and what is judged is
the median of the rounds' ratios. A measurement is a module with its parts and its tables; ``__main__`` lets them take
turns, ``results`` is the file of raw figures, ``report`` the document that is made of it. Everything runs on loopback.
"""
