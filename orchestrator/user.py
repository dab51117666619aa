"""Who asks: for claims, and for the records at a place."""

from __future__ import annotations

import getpass
import os
import platform


def user_name() -> str:
    """Who launches: `ORCH_USER`, else the login name. The same launch from the same user is one run."""
    return os.environ.get("ORCH_USER") or getpass.getuser()


def who() -> str:
    """The user and the workstation."""
    return f"{user_name()}@{platform.node()}"
