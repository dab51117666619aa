"""What happened to the run from outside: signals, its container, its host, its terminal, its clock."""

from __future__ import annotations

from orchestrator.diagnosis.catalogue.words import line
from orchestrator.diagnosis.model import Cause

CAUSES = (
    Cause(
        "killed",
        "somebody or something sent SIGKILL; nothing says that memory ran out",
        "place",
        (line("Killed", r"^(?:.*: line \d+: +\d+ )?Killed\b(?!:)", role="echo"),),
        (
            "The kernel counted no out-of-memory kill where that could be read. Ask who else works there; supervisors "
            "and stop scripts end with SIGKILL too.",
        ),
        structured=("sigkill",),
        retry=True,
        precedence=32,
    ),
    Cause(
        "terminal-hangup",
        "its terminal was closed (SIGHUP)",
        "place",
        (
            line("Hangup", r"^(?:.*: line \d+: +\d+ )?Hangup(?:$| {4})"),
            line(
                ("SIGHUP", "Signals.SIGHUP"),
                r"(?:received|got|Received) (?:signal )?(?:Signals\.)?SIGHUP|SignalException: .* got signal: 1$",
            ),
        ),
        (
            "A program that was started from a shell ends when the connection does. Launched by orch it has no such "
            "terminal.",
        ),
        structured=("sighup",),
        retry=True,
        precedence=56,
    ),
    Cause(
        "terminated",
        "it was told to end (SIGTERM), and nobody asked orch for that",
        "place",
        (line("Terminated", r"^(?:.*: line \d+: +\d+ )?Terminated(?:$| {4})", role="echo"),),
        ("A machine or container that shuts down does that, or a scheduler, or somebody with kill.",),
        structured=("sigterm",),
        retry=True,
        precedence=31,
    ),
    Cause(
        "stopped",
        "it was stopped by request",
        "place",
        (),
        ("Launch it again to go on.",),
        structured=("stop_asked",),
        retry=True,
        precedence=99,
    ),
    Cause(
        "container-stopped",
        "the container is stopped",
        "place",
        (line("not running!", r"^container '[^']+' not running!|^CT \d+ not running"),),
        ("Start it, and launch again. Backups in stop mode, the host's shutdown and HA stop containers too.",),
        "ssh {host} pct start {container}",
        structured=("container_not_running",),
        retry=True,
        precedence=98,
    ),
    Cause(
        "container-frozen",
        "the container is frozen",
        "place",
        (),
        ("A backup in suspend mode freezes it for a while; it goes on by itself. Nothing is lost.",),
        "ssh {host} pct status {container} --verbose",
        structured=("container_frozen",),
        retry=False,
        precedence=97,
    ),
    Cause(
        "container-restarted",
        "the container was restarted under the run",
        "place",
        (),
        (
            "The run's processes went with it. See the node's backup jobs (stop mode) and HA. Launch again: it goes "
            "on from the last checkpoint.",
        ),
        "orch launch {recipe}",
        structured=("container_restarted",),
        retry=True,
        precedence=97,
    ),
    Cause(
        "host-rebooted",
        "the host was rebooted under the run",
        "place",
        (),
        ("The run's processes went with it. Look at the host's log for why; launch again when the driver is up.",),
        "ssh {host} last -x reboot",
        structured=("host_rebooted",),
        retry=True,
        precedence=97,
    ),
    Cause(
        "runner-killed",
        "the run's keeper was killed, so that nothing recorded the end",
        "place",
        (),
        (
            "Whoever ended it ended it hard (SIGKILL, or the kernel for want of memory). What still lives of the run "
            "is named; orch stop ends it.",
        ),
        "orch stop {run}",
        structured=("runner_gone",),
        retry=True,
        precedence=42,
    ),
    Cause(
        "tmux-gone",
        "its tmux server is gone; the run itself goes on",
        "place",
        (
            line(
                ("no server running on", "server exited unexpectedly", "lost server"),
                r"no server running on /\S*tmux|^\[server exited|^\[lost server",
            ),
        ),
        ("Nothing is lost: the log is written by the run itself. There is no terminal to attach to any more.",),
        "orch logs -f {run}",
        structured=("tmux_server_gone",),
        precedence=15,
    ),
    Cause(
        "clock-skew",
        "the clocks of the place and of this machine differ",
        "place",
        (
            line("clock skew", r"(?i)clock skew detected|RequestTimeTooSkewed"),
            line("RequestTimeTooSkewed", r"RequestTimeTooSkewed"),
        ),
        ("Set the time on the host (chrony, systemd-timesyncd): certificates, tokens and S3 depend on it.",),
        "ssh {host} timedatectl",
        structured=("clock_is_off",),
        precedence=14,
    ),
)
