"""Documented import path of the constants of agents, reset files and the recover client.

It is the same module object, so that a constant that a program sets here takes effect.
"""

import sys

from taskd.ascend.documented import agent_constants
from taskd.ascend.documented.agent_constants import *  # noqa: F403

sys.modules[__name__] = agent_constants
