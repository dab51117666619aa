"""The way into a container, and what its texts mean."""

from __future__ import annotations

import pytest

from orchestrator.config.models import Container
from orchestrator.errors import Refused, Unreachable, UsageError
from orchestrator.place import container
from orchestrator.place.container import classify, foreign_shell, learn_keep_env, wrap

PCT = Container(kind="pct", id="200")
LXC = Container(kind="lxc", id="train")


@pytest.fixture(autouse=True)
def nothing_learnt(monkeypatch):
    monkeypatch.setattr(container, "_without_keep_env", set())


def test_argv_of_each_kind():
    assert wrap(PCT, ["ls", "-l"], "pve") == ["pct", "exec", "200", "--keep-env", "0", "--", "ls", "-l"]
    assert wrap(LXC, ["ls", "-l"], "pve") == ["lxc-attach", "-n", "train", "--clear-env", "--", "ls", "-l"]


def test_an_older_pct_is_learnt_once_a_host():
    text = "Unknown option: keep-env\n400 unable to parse option\npct exec <vmid> [<extra-args>]\n"
    assert not learn_keep_env("pve", "something else")
    assert learn_keep_env("pve", text)
    assert not learn_keep_env("pve", text)
    assert wrap(PCT, ["true"], "pve") == ["pct", "exec", "200", "--", "true"]
    assert "--keep-env" in wrap(PCT, ["true"], "other")


@pytest.mark.parametrize(
    ("text", "kind", "words", "hint"),
    [
        ("Configuration file 'nodes/pve/lxc/200.conf' does not exist", UsageError, "no container 200", "pct list"),
        ("400 Parameter verification failed.\nvmid: invalid format - x", UsageError, "not a VMID", ""),
        ("container '200' not running!", Unreachable, "200 on pve is not running", "pct start 200"),
        ("CT 200 not running", Unreachable, "200 on pve is not running", "pct start 200"),
        (
            "ipcc_send_rec[1] failed: Connection refused\nUnable to load access control list: Connection refused",
            Unreachable,
            "cluster file system on pve is down",
            "pve-cluster",
        ),
        ("please run as root", Unreachable, "needs root", ""),
        (
            "trying to acquire lock...\ncan't lock file '/run/lock/lxc/pve-config-200.lock' - got timeout",
            Unreachable,
            "pve-config-200.lock",
            "",
        ),
        ("CT is locked (backup)", Unreachable, r"locked \(backup\)", ""),
        ("Device /dev/nvidia0 does not exist", Unreachable, "/dev/nvidia0", ""),
        ("sh: 1: pct: not found", UsageError, "has no pct", "lxc"),
        ("orch-host: 60: exec: pct: not found", UsageError, "has no pct", "lxc"),
        ("bash: line 1: pct: command not found", UsageError, "has no pct", "lxc"),
        ("missing command at /usr/share/perl5/PVE/CLI/pct.pm line 246.", Unreachable, "does not understand", ""),
        ("400 not enough arguments\npct exec <vmid>", Unreachable, "does not understand", ""),
        ("Unknown option: l\n400 unable to parse option", Unreachable, "Unknown option: l", ""),
    ],
)
def test_texts_of_pct(text, kind, words, hint):
    error = classify(f"perl: warning: Setting locale failed.\n{text}\n", "pve/200", "pve", PCT)
    assert type(error) is kind
    import re

    assert re.search(words, error.message), error.message
    assert hint in error.hint
    assert "{" not in error.message + error.hint and "\n" not in error.message


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("lxc-attach: train: attach.c: 1: Failed to get init pid", Unreachable, "not running"),
        ("lxc-attach: train: ../src/lxc/attach.c: lxc_attach: 993 Connection refused", Unreachable, "not running"),
        ("lxc-attach: train: tools/lxc_attach.c: main: 1 Insufficent privileges to control train", Unreachable, "root"),
        ("sh: 1: lxc-attach: not found", UsageError, "LXC is not installed"),
    ],
)
def test_texts_of_lxc(text, kind, words):
    error = classify(text, "box/train", "box", LXC)
    assert type(error) is kind and words in error.message and "pct" not in error.message + error.hint


def test_other_texts_say_nothing():
    assert classify("bash: warning: something\nTraceback (most recent call last):", "pve/200", "pve", PCT) is None


def test_a_login_shell_that_does_not_read_posix_quoting():
    assert isinstance(foreign_shell("Unmatched '''.\n"), Refused)
    assert isinstance(foreign_shell("fish: Unknown command: x"), Refused)
    assert foreign_shell("bash: x: not found") is None
