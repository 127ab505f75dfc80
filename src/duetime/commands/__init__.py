"""The commands that talk to a service: ``grammar`` defines what can be typed, the other modules carry it out.

Only ``grammar`` is imported before the command is known, so that no command pays for the imports of another.
"""
