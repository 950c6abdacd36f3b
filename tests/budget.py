"""How long tests wait for what comes for certain: one limit for all, which no busy machine needs."""

from __future__ import annotations

import os

# A factor for machines that are slower, or that others share.
PATIENCE = float(os.environ.get("MESHBOOK_TEST_PATIENCE", "1"))

WAIT_S = 60.0 * PATIENCE

# Seconds after which a look at something that has not come to pass is repeated.
POLL_S = 0.01
