"""Several processes: NCCL, gloo, torchrun; and what only follows from another rank's end."""

from __future__ import annotations

from orchestrator.diagnosis.catalogue.words import line, raised
from orchestrator.diagnosis.model import Cause

CAUSES = (
    Cause(
        "ranks-diverged",
        "the ranks called different collectives",
        "distributed",
        (
            raised("RuntimeError", "Detected mismatch between collectives on ranks"),
            raised(
                "RuntimeError|DistBackendError",
                "Mismatch between collective operation types",
                "collective operation mismatch",
            ),
            line("Detected mismatch between collectives on ranks", r"Detected mismatch between collectives on ranks"),
        ),
        (
            "One rank took another branch: a batch fewer, a skipped step, an evaluation on one rank only. The message "
            "names both calls and their shapes.",
        ),
        precedence=78,
    ),
    Cause(
        "same-gpu-twice",
        "two ranks use the same GPU",
        "distributed",
        (line("Duplicate GPU detected", r"Duplicate GPU detected"),),
        ("Give each rank a card of its own: torch.cuda.set_device(local_rank), and no more ranks than cards.",),
        precedence=80,
    ),
    Cause(
        "collective-timeout",
        "a collective operation timed out: a rank is stuck, or gone",
        "distributed",
        (
            line(
                "Watchdog caught collective operation timeout",
                r"Watchdog caught collective operation timeout",
                role="echo",
            ),
            line("watchdog got stuck", r"watchdog got stuck", role="echo"),
            raised(
                "RuntimeError|DistBackendError",
                "Timed out waiting",
                "Some NCCL operations have failed or timed out",
                "wait timeout after",
                role="echo",
            ),
            raised("TimeoutError|DistStoreError", "Timed out after", "timed out waiting for clients", role="echo"),
        ),
        (
            "Nothing in the log says why. The rank with the lowest last completed work, or without any time-out "
            "message, is the one to look at.",
            "At the start: ranks that compile longer than others; stage the compile cache, raise the first time-out. "
            "On two or more cards without NVLink: test with NCCL_P2P_DISABLE=1.",
        ),
        "orch diagnose {run} --stacks",
        precedence=47,
    ),
    Cause(
        "nccl-error",
        "NCCL failed",
        "distributed",
        (
            raised(
                "DistBackendError|RuntimeError",
                "ncclUnhandledCudaError",
                "ncclSystemError",
                "ncclInternalError",
                "unhandled cuda error",
                "unhandled system error",
                literals=(
                    "ncclUnhandledCudaError",
                    "ncclSystemError",
                    "ncclInternalError",
                    "unhandled cuda error",
                    "unhandled system error",
                ),
            ),
            line("NCCL WARN", r"NCCL WARN .*(?:fail|error|Error)", role="echo"),
        ),
        (
            "Set NCCL_DEBUG=WARN in the recipe's env and launch again: NCCL then names the call and the interface.",
            "Frequent: too small a /dev/shm, a wrong NCCL_SOCKET_IFNAME, peer-to-peer between these cards.",
        ),
        "orch launch {recipe} --set env.NCCL_DEBUG=WARN",
        precedence=45,
        family="cuda",
    ),
    Cause(
        "rank-died",
        "one rank died, and the others were ended with it",
        "distributed",
        (
            line("ChildFailedError", r"ChildFailedError", role="echo"),
            line("failed (exitcode:", r"failed \(exitcode: -?\d+\)", role="echo"),
            line("raise SpawnException", r"ProcessExitedException|ProcessRaisedException", role="echo"),
            raised("ProcessExitedException", literals=("ProcessExitedException",), role="echo"),
        ),
        (
            "The rank named left no message of its own. A negative exit code is a signal: -9 is SIGKILL (memory, or "
            "somebody), -11 a crash in native code, -6 an abort.",
            "With torchelastic's @record around main, its traceback is kept in an error file.",
        ),
        structured=("rank_first",),
        precedence=30,
    ),
    Cause(
        "other-place-failed",
        "another place of the run failed first, and this one was ended with it",
        "distributed",
        (),
        ("Nothing has to be wrong here: what this log ends with followed from it. The cause is at the place named.",),
        "orch diagnose {run_id} --place {first_place}",
        structured=("other_place_failed",),
        precedence=98,
    ),
    Cause(
        "other-place-silent",
        "another place of the run was not heard of any more",
        "distributed",
        (),
        (
            "What became of it is unknown: its machine, its container, its runner or the network between them may be "
            "gone. If only the network was, its own record says that it did not hear of the others.",
        ),
        "orch status {run_id} --place {first_place}",
        retry=True,
        structured=("other_place_silent",),
        precedence=98,
    ),
    Cause(
        "peer-gone",
        "a connection to another process broke",
        "distributed",
        (
            raised(
                "RuntimeError|DistBackendError|DistNetworkError|ConnectionResetError|ConnectionError|BrokenPipeError|EOFError",
                "Connection closed by peer",
                "Connection reset by peer",
                "Broken pipe",
                "failed to recv, got 0 bytes",
                "ncclRemoteError",
                "remote process exited",
                "Connection closed by remote peer",
                "Socket Timeout",
                "Application timeout caused pair closure",
                role="echo",
            ),
            line("exited unexpectedly", r"DataLoader worker \(pid\(?s?\)? .*exited unexpectedly", role="echo"),
            line(
                "is killed by signal: Killed", r"DataLoader worker \(pid \d+\) is killed by signal: Killed", role="echo"
            ),
            line("closing signal SIGTERM", r"closing signal SIGTERM", role="echo"),
            line("Signal 15 (SIGTERM)", r"Received Signals\.SIGTERM|SignalException|Signal 15", role="echo"),
        ),
        (
            "Another process of the run ended, and this one noticed. Its own message, if there is one, stands "
            "earlier or in another rank's log.",
        ),
        precedence=20,
    ),
    Cause(
        "port-in-use",
        "the port is in use by another process",
        "distributed",
        (
            raised(
                "DistNetworkError|RuntimeError|OSError|[A-Za-z]*Error",
                "EADDRINUSE",
                "Address already in use",
                "address already in use",
            ),
            line(("EADDRINUSE", "Address already in use"), r"(?:errno|Errno|code)[: ]*98|EADDRINUSE|\[Errno 98\]"),
        ),
        (
            "A run before this one still lives, or two runs were given the same port. Look for a stale run; give "
            "each run its own (torchrun --standalone, or --rdzv-endpoint localhost:0).",
        ),
        "orch status --place {place}",
        retry=True,
        precedence=82,
    ),
    Cause(
        "rendezvous-failed",
        "the ranks did not find each other",
        "distributed",
        (
            raised(
                "RendezvousConnectionError|RendezvousTimeoutError|RendezvousClosedError",
                literals=("RendezvousConnectionError", "RendezvousTimeoutError", "RendezvousClosedError"),
            ),
            raised(
                "DistNetworkError|DistStoreError|RuntimeError",
                "client socket has failed to connect",
                "client socket has timed out",
                "failed to connect to",
                "waiting for clients. ",
            ),
        ),
        (
            "MASTER_ADDR and MASTER_PORT must be reachable from every rank, and every rank must start. Look whether "
            "rank 0 runs, at a firewall, and at a host name that resolves differently.",
        ),
        precedence=58,
    ),
)
