"""``python -m duetime``: the same as the command ``duetime``."""

import sys

from duetime.cli import main

sys.exit(main())
