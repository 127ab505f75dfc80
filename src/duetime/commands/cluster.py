"""``duetime cluster``: the instances and the shards they own."""

from __future__ import annotations

import argparse

from duetime.client import Client
from duetime.commands import output, tables


def show(client: Client, options: argparse.Namespace) -> int:
    found = client.cluster()
    if options.json:
        output.print_json(found)
        return 0
    print(*tables.cluster_table(found), sep="\n")
    if found.unowned:
        print(f"{len(found.unowned)} of {found.shards} shards have no owner: {output.ranges(found.unowned)}")
    if found.abilities is not None and found.abilities.time_source == "machine":
        print("Each instance uses the clock of its own machine: synchronize the clocks with NTP.")
    return 0
