"""``duetime cluster``: who takes part, and who owns which shard."""

from __future__ import annotations

import argparse

from duetime.client import Client
from duetime.commands import output


def show(client: Client, options: argparse.Namespace) -> int:
    found = client.cluster()
    if options.json:
        output.print_json(found)
        return 0
    print(*output.cluster_table(found), sep="\n")
    if found.unowned:
        print(f"{len(found.unowned)} of {found.shards} shards have no owner now: {output.ranges(found.unowned)}")
    return 0
