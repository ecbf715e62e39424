"""`python -m taskd.manager`."""

import sys

from taskd.manager.command import main

sys.exit(main())
