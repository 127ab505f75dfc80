"""Isolation under load: does one bad destination, or one busy namespace, delay the timers of others?

``python -m tests.isolation --help`` shows how to run it. ``scenarios`` has the kinds of trouble, one function each;
``world`` runs one of them next to a healthy client and measures both; ``receiver`` receives the callbacks, in its own
processes; ``names`` is a DNS server that can be slow or silent; ``report`` prints the results.
"""
