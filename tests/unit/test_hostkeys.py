"""known_hosts files: read as OpenSSH reads them, added to, and never rewritten unasked."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess

import pytest

from orchestrator.errors import Refused, UsageError
from orchestrator.place import hostkeys, known_hosts
from orchestrator.place.known_hosts import HostKey, append, check, line_for, matches, recorded, types_first

KEY = HostKey("ssh-ed25519", b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes(32))
OTHER = HostKey("ssh-ed25519", b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes([1]) * 32)
RSA = HostKey("ssh-rsa", b"\0\0\0\x07ssh-rsa" + bytes(36))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "ssh" / "known_hosts"


def write(file, *lines):
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(line + "\n" for line in lines))


def judge(file, key=KEY, name="box"):
    check(key, [file], name, "pve", "root@box")


@pytest.mark.parametrize(
    ("patterns", "name", "yes"),
    [
        ("box", "box", True),
        ("BOX,192.0.2.1", "box", True),
        ("a,b", "box", False),
        ("*.example", "box.example", True),
        ("b?x", "box", True),
        ("*,!box", "box", False),
        ("[box]:2222", "[box]:2222", True),
        ("[box]:2222", "box", False),
        ("[box]:*", "[box]:22", True),
        ("b[o]x", "box", False),
        ("|1|nonsense|x", "box", False),
    ],
)
def test_patterns(patterns, name, yes):
    assert matches(patterns, name) is yes


def test_hashed_names_are_found():
    assert matches(line_for(KEY, "box", hashed=True).split()[0], "box")
    assert not matches(line_for(KEY, "box", hashed=True).split()[0], "other")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="OpenSSH is not installed")
@pytest.mark.parametrize("name", ["box", "[box]:2222"])
@pytest.mark.parametrize("hashed", [False, True])
def test_openssh_finds_what_is_written(file, name, hashed):
    append(file, line_for(KEY, name, hashed))
    done = subprocess.run(["ssh-keygen", "-F", name, "-l", "-f", str(file)], capture_output=True, text=True, check=True)
    assert KEY.fingerprint in done.stdout


def test_the_fingerprint_is_of_the_key():
    digest = base64.b64encode(hashlib.sha256(KEY.blob).digest()).decode().rstrip("=")
    assert KEY.fingerprint == f"SHA256:{digest}"


def test_an_unknown_key_is_refused(file):
    for lines in ([], ["# comment", "", "junk", "box ssh-ed25519 !!!", line_for(KEY, "elsewhere", False)]):
        write(file, *lines)
        with pytest.raises(Refused, match="not known") as caught:
            judge(file)
        assert KEY.fingerprint in caught.value.message and caught.value.hint == "orch trust pve"


def test_a_known_key_passes(file):
    write(file, "malformed", line_for(OTHER, "box", False), line_for(KEY, "box", True))
    judge(file)


def test_a_changed_key_is_refused_with_file_and_line(file):
    write(file, "# comment", line_for(RSA, "box", False), line_for(OTHER, "box", True))
    with pytest.raises(Refused, match="has changed") as caught:
        judge(file)
    assert f"{file}:3" in caught.value.message
    assert f"ssh-keygen -R 'box' -f {file}" in caught.value.hint


def test_a_key_of_another_type_is_a_change_too(file):
    write(file, line_for(RSA, "box", False))
    with pytest.raises(Refused, match=r"has changed.*ssh-rsa"):
        judge(file)


def test_a_revoked_key_is_refused(file):
    write(file, line_for(KEY, "box", False), "@revoked " + line_for(KEY, "*", False))
    with pytest.raises(Refused, match=r"revoked in .*:2"):
        judge(file)


def test_authorities_do_not_count(file):
    write(file, "@cert-authority " + line_for(KEY, "box", False))
    with pytest.raises(Refused, match="not known"):
        judge(file)


def test_another_port_may_be_recorded_without_it(file):
    write(file, line_for(KEY, "box", False))
    judge(file, name="[box]:2222")
    with pytest.raises(Refused, match="not known"):
        judge(file, OTHER, name="[box]:2222")


def test_recorded_types_are_asked_for_first(file):
    write(file, line_for(RSA, "box", False))
    offered = ("ssh-ed25519", "rsa-sha2-256", "rsa-sha2-512")
    assert types_first(recorded([file], "box"), offered) == ("rsa-sha2-512", "rsa-sha2-256", "ssh-ed25519")
    assert types_first([], offered) == offered


def test_adding_keeps_what_is_there(file):
    append(file, "one")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    file.write_text("torn")
    file.chmod(0o644)
    append(file, "two")
    assert file.read_text() == "torn\ntwo\n" and file.stat().st_mode & 0o777 == 0o644


def test_lines_are_taken_out_of_the_file_a_link_points_to(file, tmp_path):
    write(file, "one", "two", "three")
    (tmp_path / "link").symlink_to(file)
    hostkeys.remove_lines(tmp_path / "link", {2})
    assert file.read_text() == "one\nthree\n" and (tmp_path / "link").is_symlink()
    assert (file.parent / "known_hosts.old").read_text() == "one\ntwo\nthree\n"


def test_a_file_that_cannot_be_read_is_no_empty_one(tmp_path):
    with pytest.raises(Refused, match="cannot be read"):
        recorded([tmp_path], "box")
    assert recorded([tmp_path / "none"], "box") == []


def test_fingerprints_as_people_type_them():
    ours = KEY.fingerprint
    assert hostkeys.same_fingerprint(ours.removeprefix("SHA256:") + "=", ours)
    assert hostkeys.same_fingerprint(f" {ours}\n", ours)
    assert not hostkeys.same_fingerprint(ours[:-1], ours)
    assert not hostkeys.same_fingerprint("", ours)


class TestTrust:
    @pytest.fixture
    def host(self, file, tmp_path, monkeypatch):
        from orchestrator.config.models import Host, Ssh

        monkeypatch.setattr(hostkeys, "_offered", lambda host, route: KEY)
        config = tmp_path / "config"
        config.write_text("")
        return Host(name="pve", ssh=Ssh(host="box", ssh_config=config, known_hosts=file))

    def test_another_key_stops_it(self, host, file):
        write(file, line_for(OTHER, "box", False))
        with pytest.raises(Refused, match="has changed") as caught:
            hostkeys.trust(host)
        assert "--replace" in caught.value.hint
        assert recorded([file], "box")[0].key == OTHER

    def test_replacing_shows_what_goes(self, host, file):
        write(file, "# kept", line_for(OTHER, "box", True), line_for(OTHER, "elsewhere", False))
        seen = []
        done = hostkeys.trust(host, replace=True, confirm=lambda address, key, old: seen.append((key, old)) or True)
        assert done.how == "replaced" and seen[0][0] == KEY and seen[0][1][0].line == 2
        assert [entry.key for entry in recorded([file], "box")] == [KEY]
        assert file.read_text().startswith("# kept\n") and recorded([file], "elsewhere")

    def test_a_global_file_is_not_touched(self, host, file, tmp_path, monkeypatch):
        everyone = tmp_path / "global"
        write(file)
        everyone.write_text(line_for(OTHER, "box", False) + "\n")
        from dataclasses import replace

        resolve = hostkeys.resolve
        monkeypatch.setattr(hostkeys, "resolve", lambda ssh: replace(resolve(ssh), global_known_hosts=(everyone,)))
        with pytest.raises(Refused, match="not the user's own"):
            hostkeys.trust(host, replace=True)

    def test_a_folder_that_cannot_be_written(self, host, file):
        file.parent.write_text("in the way")
        with pytest.raises(UsageError, match="cannot be written"):
            hostkeys.trust(host)


def test_known_hosts_names():
    assert known_hosts.names_for("[box]:2222") == ["[box]:2222", "box"]
    assert known_hosts.names_for("box") == ["box"]
