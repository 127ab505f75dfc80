"""Mutation tests: change one thing in the code, run the tests for it, and check whether one of them fails.

``python -m tests.mutants --help`` shows how to run them; docs/mutants.md has the results of the last run.
"""
