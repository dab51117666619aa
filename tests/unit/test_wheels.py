"""Fetching with pip, the store, and what pip's failures are called."""

from __future__ import annotations

import os
import threading
import time

import pytest

from orchestrator.environment import pip_settings, relock, torch_cpu
from orchestrator.environment.lock import Pin, missing, pins, unlisted
from orchestrator.environment.pip_download import NoWheel, Offline, WrongHash, download, explain
from orchestrator.environment.progress import silent
from orchestrator.environment.pylock import NamedWheel, read_pylock
from orchestrator.environment.store import WheelStore
from orchestrator.environment.target import Target
from orchestrator.environment.uv_tool import uv_there, uv_to_send, workstation_uv
from orchestrator.environment.wheels import fetch, stored
from orchestrator.errors import OrchError, UsageError
from tests.tiny_wheels import lock_text, make_wheel, sha256

TARGET = Target("x86_64", "Linux", ("glibc", "2.36"), "3.12.1", "/usr/bin/python3")
ELSEWHERE = Target("aarch64", "Linux", ("glibc", "2.31"), "3.10.2", "/usr/bin/python3")


@pytest.fixture
def links(tmp_path, monkeypatch):
    """A folder that pip is told to look in, and nowhere else."""
    folder = tmp_path / "links"
    folder.mkdir()
    only(monkeypatch, PIP_FIND_LINKS=str(folder), PIP_NO_INDEX="1")
    return folder


def only(monkeypatch, **settings):
    """pip has these settings alone."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_NO_INDEX", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def store(tmp_path):
    return WheelStore(tmp_path / "store")


def test_a_wheel_is_fetched_once(links, store):
    wheel = make_wheel(links)
    wanted = pins(lock_text([wheel]), TARGET)
    told = []
    found = fetch(wanted, TARGET, store, lambda *words: told.append(words))
    digest = sha256(wheel)
    assert [w.path for w in found] == [store.root / digest[:2] / digest / wheel.name]
    assert found[0].size == wheel.stat().st_size and found[0].origin == "lock"
    assert ("fetching wheels", 1, 1, "wheels") in told
    assert [entry.name for entry in store.root.iterdir()] == [digest[:2]]
    wheel.unlink()
    told.clear()
    assert fetch(wanted, TARGET, store, lambda *words: told.append(words)) == found and not told


def test_the_wheel_of_the_place_is_taken(links, store):
    native = [
        make_wheel(links, "native", tag="cp312-cp312-manylinux_2_28_x86_64", padding=32),
        make_wheel(links, "native", tag="cp310-cp310-manylinux_2_17_aarch64", padding=64),
        make_wheel(links, "native", tag="py3-none-any", padding=96),
    ]
    text = "native==1.0 " + " ".join(f"--hash=sha256:{sha256(wheel)}" for wheel in native)
    assert fetch(pins(text, TARGET), TARGET, store, silent)[0].filename == native[0].name
    assert fetch(pins(text, ELSEWHERE), ELSEWHERE, store, silent)[0].filename == native[1].name
    assert stored(pins(text, TARGET), TARGET, store)[0][0].filename == native[0].name


def test_no_wheel_for_the_place(links, store):
    wheel = make_wheel(links, "native", tag="cp311-cp311-manylinux_2_28_x86_64")
    with pytest.raises(NoWheel) as caught:
        fetch(pins(lock_text([wheel]), TARGET), TARGET, store, silent)
    assert "no wheel of native 1.0 for CPython 3.12 on Linux x86_64 (glibc 2.36)" in caught.value.message
    assert "\n" not in caught.value.message


def test_sources_alone_are_no_wheel(links, store):
    (links / "src-1.0.tar.gz").write_bytes(b"not looked at")
    with pytest.raises(NoWheel, match=r"no wheel of src 1\.0"):
        fetch([Pin("src", "1.0", ("0" * 64,))], TARGET, store, silent)


def test_a_file_that_is_not_the_locked_one(links, store):
    wheel = make_wheel(links)
    with pytest.raises(WrongHash) as caught:
        fetch([Pin("tiny", "1.0", ("0" * 64,))], TARGET, store, silent)
    assert wheel.name in caught.value.message and sha256(wheel) in caught.value.message
    assert not [*store.root.rglob("*.whl")]


def test_nothing_is_fetched_without_a_hash(links, store):
    make_wheel(links)
    with pytest.raises(OrchError, match=r"no hash for tiny==1\.0"):
        fetch([Pin("tiny", "1.0", ())], TARGET, store, silent)


def test_offline_is_one_sentence_and_soon(store, monkeypatch):
    only(monkeypatch, PIP_INDEX_URL="https://user:secret@127.0.0.1:9/simple")
    began = time.monotonic()
    with pytest.raises(Offline) as caught:
        fetch([Pin("tiny", "1.0", ("0" * 64,)), Pin("other", "1.0", ("0" * 64,))], TARGET, store, silent)
    assert time.monotonic() - began < 30
    assert caught.value.message == (
        "the package index cannot be reached (the connection is refused), and 2 wheels are not in this "
        "machine's store, tiny==1.0 first"
    )
    assert caught.value.exit_code == 1 and "secret" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    ("output", "kind", "words"),
    [
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NameResolutionError(\"<x>: Failed to "
            "resolve 'h' ([Errno -2] Name or service not known)\")': /simple/tiny/\nERROR: Could not find a version\n"
            "ERROR: No matching distribution found for tiny==1.0\n",
            Offline,
            "its name does not resolve",
        ),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", Offline, "certificate"),
        ("ERROR: Could not install: [Errno 28] No space left on device", OrchError, "full"),
        *(
            (
                f"ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n    {line}:\n"
                f"        Expected sha256 {'0' * 64}\n             Got        {'1' * 64}\n",
                WrongHash,
                words,
            )
            for line, words in (
                (
                    "tiny==1.0 from https://h/tiny-1.0-py3-none-any.whl (from -r w (line 1))",
                    "tiny-1.0-py3-none-any.whl as",
                ),
                (
                    "t@ file:///l/t-2%2Bcpu-x.whl from file:///l/t-2%2Bcpu-x.whl (from -r w (line 1))",
                    "t-2+cpu-x.whl as",
                ),
                ("t @ file:///l/t-2%2Bcpu-x.whl from file:///l/t-2%2Bcpu-x.whl (from -r w (line 1))", "gives for t:"),
                ("tiny==1.0 from https://h/tiny-1.0.whl#sha256=00", "tiny-1.0.whl as"),
                ("tiny==1.0", "tiny==1.0 as"),
            )
        ),
        ("ERROR: something else\n", OrchError, "something else"),
        ("", OrchError, "said nothing"),
        ("    The user requested tiny==1.0\nERROR: ResolutionImpossible: for help", NoWheel, "tiny 1.0"),
    ],
)
def test_failures_have_names(output, kind, words):
    error = explain(output, TARGET, 3)
    assert type(error) is kind and words in error.message and "\n" not in error.message


def test_two_fetch_the_same_at_once(links, store):
    wheels = [make_wheel(links, f"w{n}", padding=1 << 16) for n in range(3)]
    wanted = pins(lock_text(wheels), TARGET)
    found = []
    threads = [threading.Thread(target=lambda: found.append(fetch(wanted, TARGET, store, silent))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and found[0] == found[1] == found[2]
    assert len([*store.root.rglob("*.whl")]) == 3


def test_a_store_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OrchError, match="cannot be written"), WheelStore(tmp_path / "file/store").workspace():
        pass


def test_workspaces_of_the_killed_are_removed(store):
    old, new = store.root / "fetch-old", store.root / "fetch-new"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (0, 0))
    with store.workspace() as folder:
        assert not old.exists() and new.exists() and folder.is_dir()
    assert not folder.exists()


def test_the_cache_folder_is_named_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_CACHE_DIR", str(tmp_path / "here"))
    assert WheelStore().root == tmp_path / "here/wheels"


CPU = "torch-2.13.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl"


def test_a_cpu_build_by_the_hash_of_the_lock(links, store):
    wheel = make_wheel(links, "torch", "2.13.0+cpu", "cp312-cp312-manylinux_2_28_x86_64")
    wanted = pins(lock_text([wheel]), TARGET)
    assert fetch(wanted, TARGET, store, silent)[0].origin == "lock"


def test_a_cpu_build_that_no_one_vouches_for_is_not_taken(links, store, monkeypatch):
    make_wheel(links, "torch", "2.13.0+cpu", "cp312-cp312-manylinux_2_28_x86_64")
    make_wheel(links, "torch", "2.13.0", "cp312-cp312-manylinux_2_28_x86_64")
    own = torch_cpu.name_wheel
    monkeypatch.setattr(
        torch_cpu,
        "name_wheel",
        lambda *a, backend, files_too: (
            torch_cpu.Named(None, True) if backend else own(*a, backend=False, files_too=files_too)
        ),
    )
    with pytest.raises(OrchError) as caught:
        fetch([Pin("torch", "2.13.0+cpu", ("0" * 64,))], TARGET, store, silent)
    assert "torch 2.13.0+cpu for CPython 3.12" in caught.value.message
    assert "cannot be reached" in caught.value.message and "a CUDA build is not taken" in caught.value.message
    assert not [*store.root.rglob("*.whl")]


def test_a_cpu_build_by_the_hash_of_its_index(links, store, monkeypatch):
    wheel = make_wheel(links / "elsewhere", "torch", "2.13.0+cpu", "cp312-cp312-manylinux_2_28_x86_64")
    named = NamedWheel("torch", "2.13.0+cpu", wheel.as_uri(), wheel.name, sha256(wheel))
    monkeypatch.setattr(torch_cpu, "name_wheel", lambda *_, backend, files_too: torch_cpu.Named(named))
    wanted = [Pin("torch", "2.13.0+cpu", ("0" * 64,))]
    assert fetch(wanted, TARGET, store, silent)[0].origin == "index"
    wheel.unlink()
    assert fetch(wanted, TARGET, store, silent)[0].origin == "index"
    bad = NamedWheel("torch", "2.13.1+cpu", wheel.as_uri(), wheel.name, "1" * 64)
    make_wheel(links / "elsewhere", "torch", "2.13.0+cpu", "cp312-cp312-manylinux_2_28_x86_64")
    monkeypatch.setattr(torch_cpu, "name_wheel", lambda *_, backend, files_too: torch_cpu.Named(bad))
    with pytest.raises(WrongHash, match=r"torch-2\.13\.0.*cp312.* has sha256 .* gives for torch:"):
        fetch([Pin("torch", "2.13.1+cpu", ())], TARGET, store, silent)


def test_uv_names_a_wheel_where_pip_looks(links):
    wheel = make_wheel(links, "torch", "2.13.0+cpu", "cp312-cp312-manylinux_2_28_x86_64")
    settings = pip_settings.pip_settings()
    assert settings["find-links"] == str(links)
    named = torch_cpu.name_wheel("2.13.0+cpu", TARGET, settings, backend=False, files_too=True).wheel
    assert named and named.filename == CPU and named.sha256 == sha256(wheel) and named.on_disk
    assert not torch_cpu.name_wheel("2.13.0+cpu", TARGET, settings, backend=False, files_too=False).wheel
    assert not torch_cpu.name_wheel("2.13.0+cpu", ELSEWHERE, settings, backend=False, files_too=True).wheel


def test_reading_what_uv_wrote():
    digest, other = "a" * 64, "b" * 64
    text = (
        'lock-version = "1.0"\n\n[[packages]]\nname = "torch"\nversion = "2.13.0+cpu"\nwheels = [\n'
        '    { url = "https://h/torch-2.13.0%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl", upload-time = 2026, '
        f'size = 1, hashes = {{ sha256 = "{digest}" }} }},\n'
        f'    {{ path = "/x/tiny-1.0-py3-none-any.whl", hashes = {{ sha256 = "{other}" }} }},\n]\n'
    )
    first, second = read_pylock(text)
    assert (first.filename, first.sha256, first.on_disk) == (CPU, digest, False)
    assert (second.filename, second.sha256, second.on_disk) == ("tiny-1.0-py3-none-any.whl", other, True)


def test_pips_settings_in_the_words_of_uv(monkeypatch):
    listing = (
        ":env:.find-links='/a /b'\nglobal.index-url='https://one/simple'\nglobal.extra-index-url='https://two\\nhttps://x'\n"
        "global.find-links='/c'\ndownload.index-url='https://three/simple'\ninstall.index-url='https://no'\n"
        "global.cert='/ca.pem'\nglobal.no-index='true'\nnonsense\n"
    )
    settings = pip_settings.parse(listing)
    monkeypatch.setenv("UV_LINK_MODE", "symlink")
    environment = pip_settings.uv_environment(settings)
    assert environment["UV_FIND_LINKS"] == "/a,/b" and environment["UV_EXTRA_INDEX_URL"] == "https://two https://x"
    assert environment["UV_DEFAULT_INDEX"] == "https://three/simple" and environment["SSL_CERT_FILE"] == "/ca.pem"
    assert "UV_LINK_MODE" not in environment
    assert pip_settings.uv_flags(settings) == ["--no-index"]


def test_the_places_own_uv_counts_when_new_enough():
    class Facts:
        def __init__(self, version):
            self.container = {"tools": {"uv": {"path": "/usr/bin/uv", "version": version}}}

    assert uv_there(Facts("uv 0.9.1 (abc)")).remote == "/usr/bin/uv"
    assert uv_there(Facts("0.13.9")).local is None
    assert uv_there(Facts("uv 0.8.22")) is None and uv_there(Facts(None)) is None


def test_this_machines_uv_is_sent_where_it_runs(store):
    mine = uv_to_send(TARGET, store, None)
    assert mine is None or (str(mine.local) == workstation_uv() and mine.remote == f"bin/uv-{mine.sha256[:12]}")
    assert uv_to_send(Target("riscv64", "Linux", ("glibc", "2.36"), "3.11.2", ""), store, None) is None


def test_a_lock_is_made_and_read(links, tmp_path):
    make_wheel(links, "tiny", "1.0")
    make_wheel(links, "tiny", "1.1")
    folder = tmp_path / "env"
    folder.mkdir()
    (folder / "spec.yaml").write_text('python: ">=3.10,<3.13"\ntorch: "2.13.0"\nbackend: cpu\n')
    (folder / "requirements.in").write_text("tiny<2  # small\n")
    assert relock.write(folder) == relock.Locked(folder / "requirements.lock", 1, ())
    text = (folder / "requirements.lock").read_text()
    assert str(links) not in text and "://" not in text
    assert [str(pin) for pin in pins(text, TARGET)] == ["tiny==1.1"]
    (folder / "requirements.in").write_text("nowhere-to-be-found\n")
    with pytest.raises(OrchError, match="uv finds no solution"):
        relock.write(folder)
    assert (folder / "requirements.lock").read_text() == text
    (folder / "requirements.in").unlink()
    with pytest.raises(UsageError, match=r"requirements\.in is not there"):
        relock.write(folder)


def test_a_lock_for_cpu_has_cpu_builds_and_no_cuda(links, tmp_path):
    cuda = ["tiny", "nvidia-thing ; sys_platform == 'linux'", "triton ; sys_platform == 'linux'"]
    make_wheel(links, "tiny")
    make_wheel(links, "triton")
    make_wheel(links, "nvidia_thing", requires=["cuda-toolkit"])
    make_wheel(links, "cuda_toolkit")
    plain = make_wheel(links, "torch", "2.13.0", "cp311-cp311-macosx_14_0_arm64", requires=cuda)
    make_wheel(links, "torch", "2.13.0", "cp311-cp311-manylinux_2_28_x86_64", requires=cuda, padding=64)
    cpu = make_wheel(links, "torch", "2.13.0+cpu", "cp311-cp311-manylinux_2_28_x86_64", requires=["tiny"])
    folder = tmp_path / "env"
    folder.mkdir()
    (folder / "spec.yaml").write_text('python: ">=3.11,<3.12"\ntorch: "2.13.0"\nbackend: cpu\n')
    (folder / "requirements.in").write_text("torch==2.13.0\n")
    assert relock.write(folder).missing == ("torch 2.13.0+cpu for CPython 3.11 on aarch64",)
    text = (folder / "requirements.lock").read_text()
    assert "hashes of 1 of 2 Linux builds" in text
    here = Target("x86_64", "Linux", ("glibc", "2.36"), "3.11.2", "")
    there = Target("arm64", "Darwin", None, "3.11.4", "", "23.4.0")
    assert pins(text, here) == [
        Pin("tiny", "1.0", pins(text, there)[0].hashes),
        Pin("torch", "2.13.0+cpu", (sha256(cpu),)),
    ]
    assert pins(text, there)[1] == Pin("torch", "2.13.0", (sha256(plain),))
    digest = sha256(cpu)
    cpu.unlink()
    relock.write(folder)
    assert pins((folder / "requirements.lock").read_text(), here)[1].hashes == (digest,)


def test_requirements_are_given_to_pip_for_the_place(links, tmp_path):
    make_wheel(links, "native", tag="cp310-abi3-manylinux_2_17_aarch64")
    folder = tmp_path / "work"
    folder.mkdir()
    assert [path.name for path in download(["native==1.0"], ELSEWHERE, folder, silent, hashed=False)] == [
        "native-1.0-cp310-abi3-manylinux_2_17_aarch64.whl"
    ]


def test_whose_word_counts_where_the_lock_has_no_hash(links, store):
    """Nobody's, unless it is allowed for this build; and what came in so is not taken for locked later."""
    make_wheel(links)
    bare = [Pin("tiny", "1.0", ())]
    for trust in ("lock", "index"):
        with pytest.raises(OrchError, match=r"no hash for tiny==1\.0") as caught:
            fetch(bare, TARGET, store, silent, trust=trust)
        assert "orch env lock" in caught.value.hint and "--allow-unhashed" in caught.value.hint
    assert fetch(bare, TARGET, store, silent, trust="anyone")[0].origin == "nobody"
    for trust in ("lock", "index"):
        with pytest.raises(OrchError, match=r"no hash for tiny==1\.0"):
            fetch(bare, TARGET, store, silent, trust=trust)


def test_a_lock_says_what_it_lacks():
    text = (
        "#     known: torch-2.13.0+cpu-x.whl 00\n#     unknown: torch 2.11.0+cu128\n"
        "#     unlisted: the CUDA libraries\ntiny==1.0\n"
    )
    assert missing(text) == ["torch 2.11.0+cu128", "the CUDA libraries"] and unlisted(text) == ["the CUDA libraries"]


def test_a_lock_for_another_cuda_says_what_could_not_be_found(links, tmp_path):
    """The plain build tells what torch needs besides CUDA; that build's own files and libraries are left open."""
    make_wheel(links, "tiny")
    make_wheel(links, "triton")
    make_wheel(links, "nvidia_thing_cu13")
    needs = ["tiny", "nvidia-thing-cu13 ; sys_platform == 'linux'", "triton ; sys_platform == 'linux'"]
    make_wheel(links, "torch", "2.11.0", "cp311-cp311-manylinux_2_28_x86_64", requires=needs)
    folder = tmp_path / "env"
    folder.mkdir()
    (folder / "spec.yaml").write_text('python: ">=3.11,<3.12"\ntorch: "2.11.0"\nbackend: cu128\n')
    (folder / "requirements.in").write_text("torch==2.11.0\n")
    done = relock.write(folder)
    assert done.missing == (
        "torch 2.11.0+cu128",
        "the CUDA libraries that torch 2.11.0+cu128 requires",
    )
    text = (folder / "requirements.lock").read_text()
    found = {pin.name: pin for pin in pins(text, Target("x86_64", "Linux", ("glibc", "2.36"), "3.11.2", ""))}
    assert set(found) == {"tiny", "torch", "triton"} and found["torch"] == Pin("torch", "2.11.0+cu128", ())
    assert found["triton"].hashes and "://" not in text
