"""Everything that can be typed after ``duetime``, for argparse, with help that teaches by example.

Only this package is imported before the command is known, so it imports nothing else of Duetime at its top.
"""

from duetime.commands.grammar.parser import Commands, Parser, add_server_options
from duetime.commands.grammar.service import add_service_commands
from duetime.commands.grammar.timers import add_timer_commands

__all__ = ["Parser", "add_commands", "add_server_options"]


def add_commands(commands: Commands) -> None:
    add_timer_commands(commands)
    add_service_commands(commands)
