"""`python -m taskd.manager`."""

import sys

from taskd.manager.manager_command import main

sys.exit(main())
