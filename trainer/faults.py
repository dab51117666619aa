"""Where every thread stands, told on request: `orch diagnose --stacks` sends SIGUSR1 and reads what comes.

The dump is written from the signal handler itself, so it comes even while the interpreter waits in a collective, in a
compiler or for a lock. The program goes on.
"""

import faulthandler
import signal


def register() -> None:
    """From here on SIGUSR1 makes this process write the stacks of all its threads to stderr."""
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
