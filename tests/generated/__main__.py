"""`make generated`: builds the client of every generator, lets each make its round trip, and prints what came of it.

``--document`` writes that into ``docs/http-v1-api.md``.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

from tests.generated.clients import CLIENTS, Client, Failed, Missing, check_round_trip

PAGE = Path(__file__).parents[2] / "docs/http-v1-api.md"
TABLE = re.compile(r"(?<=<!-- make generated -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEAD = "| generator | version | client | result |\n|---|---|---|---|\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.generated", description="Round trips with generated clients."
    )
    parser.add_argument("names", nargs="*", help="of the clients: " + ", ".join(client.name for client in CLIENTS))
    parser.add_argument("--document", action="store_true", help="write the results into docs/http-v1-api.md")
    options = parser.parse_args()
    chosen = [client for client in CLIENTS if client.name in (options.names or [client.name])]
    results = [_result(client) for client in chosen]
    table = HEAD + "".join(
        f"| {client.generator} | {client.version()} | {client.name} | {result} |\n"
        for client, result in zip(chosen, results, strict=True)
    )
    print(table)
    if options.document:
        PAGE.write_text(TABLE.sub(lambda _: table, PAGE.read_text()))
    return 0 if set(results) == {"passed"} else 1


def _result(client: Client) -> str:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="generated-") as folder:
        try:
            check_round_trip(client, Path(folder))
            result = "passed"
        except Missing as missing:
            print(missing, file=sys.stderr)
            result = "not run"
        except Failed as failed:
            print(failed, file=sys.stderr)
            result = "failed"
    print(f"{client.name}: {result} in {time.monotonic() - started:.0f} s", flush=True)
    return result


sys.exit(main())
