"""A program that waits tells where its threads stand, and goes on."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import threading, time
from trainer import faults

go = threading.Event()

def work_that_waits():
    go.wait()

faults.register()
thread = threading.Thread(target=work_that_waits)
thread.start()
print("ready", flush=True)
input()
go.set()
thread.join()
print("went on")
"""


def test_sigusr1_tells_where_each_thread_stands_and_ends_nothing():
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", PROGRAM], text=True, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        dump = ""
        while "in <module>" not in dump:  # the main thread comes last
            line = process.stderr.readline()
            assert line, dump
            dump += line
        out, _ = process.communicate("\n")
    assert process.returncode == 0 and out == "went on\n"
    assert "in work_that_waits" in dump and dump.count("hread 0x") == 2


def test_the_signal_is_caught_before_training_begins():
    """orch sends the signal only to a program whose mask says that it catches it."""
    code = (
        "import re, trainer.loop\n"
        "from trainer import cli\n"
        "def train(*_, **__):\n"
        "    caught = re.search(r'SigCgt:\\s*(\\w+)', open('/proc/self/status').read()).group(1)\n"
        "    return int(caught, 16) >> 9 & 1\n"  # bit 9 is signal 10, SIGUSR1
        "trainer.loop.train = train\n"
        "options = cli.parser().parse_args(['train', 'trainer/configs/demo.yaml'])\n"
        "raise SystemExit(0 if cli.run(options, cli.load(options.config), 0.0) == 1 else 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
