"""Documented import path of the constants of the log, the validators and the group dump.

It is the same module object, so that a constant that a program sets here takes effect.
"""

import sys

from taskd.ascend.documented import log_constants
from taskd.ascend.documented.log_constants import *  # noqa: F403

sys.modules[__name__] = log_constants
