"""The command: runs failovers and reports their results."""

from __future__ import annotations

import sys

from tests.chaos.__main__ import main
from tests.failover.scenarios import SCENARIOS

DESCRIPTION = """\
Kill the primary of a database under load, promote its standby, and compare what clients were promised with what the
receiver got. Three instances with leases of three seconds continue with the new primary: some find it at an address
that follows the promotion, some by a URL with both hosts. Everything runs on loopback and is stopped at the end.
"""

if __name__ == "__main__":
    sys.exit(main("tests.failover", DESCRIPTION, SCENARIOS))
