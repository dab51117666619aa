"""`python -m trainer …` in processes forked from one that has imported it already: the very same, but it starts at
once, so that a test can kill and start it again many times."""

import contextlib
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["trainer.loop", "trainer.export", "torch.distributed.checkpoint"])


def start(arguments: list[str], *, run_dir: Path, log: Path, largest_file: int = 0) -> BaseProcess:
    """stdout and stderr are appended to `log`; `exitcode` is the command's, or minus the signal that killed it. With
    `largest_file` no file can grow beyond so many bytes."""
    process = _processes.Process(target=_work, args=(arguments, str(run_dir), str(log), largest_file))
    process.start()
    return process


def call(function: Callable, *arguments: object, log: Path) -> BaseProcess:
    """A function of a module in a process of its own; it says what it says to `log`."""
    process = _processes.Process(target=_call, args=(function, arguments, str(log)))
    process.start()
    return process


def send(process: BaseProcess, number: int) -> None:
    """A signal, if it still runs; and waits for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
    process.join(60)


def _call(function: Callable, arguments: tuple, log: str) -> None:
    _say_to(log)
    function(*arguments)


def _say_to(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _work(arguments: list[str], run_dir: str, log: str, largest_file: int) -> None:
    from trainer.cli import main

    _say_to(log)
    os.environ["ORCH_RUN_DIR"] = run_dir
    os.environ.pop("ORCH_METRICS", None)
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    code = main(arguments)
    sys.stdout.flush()
    sys.exit(code)
