"""The commands that talk to a server: ``grammar`` says what can be typed, the others do it and show what came of it.

Only ``grammar`` is imported before it is known which command was typed, so that none pays for another's imports.
"""
