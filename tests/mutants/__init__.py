"""Mutation tests: change one thing in the code, run the tests that are about it, and see whether one of them fails.

``python -m tests.mutants --help`` says how to run them, docs/mutants.md what came of the last run.
"""
