"""Isolation under load: does one bad destination, or one busy namespace, delay the timers of everybody else?

``python -m tests.isolation --help`` says how to run it. ``scenarios`` are the troubles, one function each; ``world``
runs one of them beside a healthy client and measures both; ``receiver`` is where callbacks go, in processes of its own;
``names`` is a DNS server that can be slow or silent; ``report`` prints the results.
"""
