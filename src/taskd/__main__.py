"""`python -m taskd`, the same as the `taskd` command."""

import sys

from taskd.cli import main

sys.exit(main())
