"""What the demo's lock means for places of every kind, and which wheels fit them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.bundled import bundled_dir
from orchestrator.environment.lock import NOTHING, environment_id, pins
from orchestrator.environment.store import fits
from orchestrator.environment.target import (
    PythonAtPlace,
    Target,
    choose_python,
    platforms,
    tags,
    target_of,
    uv_platform,
)
from orchestrator.environment.torch_cpu import build_of, cpu_pins, is_cuda_only, wants_cpu
from orchestrator.errors import ConfigError, OrchError

LOCK = (bundled_dir() / "recipes/envs/demo/requirements.lock").read_text()
GLIBC = ("glibc", "2.36")


def linux(python: str = "3.11.2", machine: str = "x86_64", libc: tuple[str, str] | None = GLIBC) -> Target:
    return Target(machine, "Linux", libc, python, "/usr/bin/python3")


def mac(python: str = "3.12.4", release: str = "23.4.0") -> Target:
    return Target("arm64", "Darwin", None, python, "/usr/bin/python3", release)


@dataclass
class Facts:
    container: dict[str, Any]


@pytest.mark.parametrize("python", ["3.10.1", "3.11.2", "3.12.4", "3.13.0", "3.14.0"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_linux_gets_the_cpu_build_and_no_cuda(python, machine):
    found = {pin.name: pin for pin in pins(LOCK, linux(python, machine))}
    assert found["torch"].version == "2.13.0+cpu" and build_of(found["torch"]) == "cpu"
    assert {"transformers", "tokenizers", "safetensors", "numpy", "pyyaml", "hf-xet"} <= set(found)
    assert not [name for name in found if is_cuda_only(name)]
    assert all(pin.hashes for pin in found.values())
    assert ("exceptiongroup" in found) == python.startswith("3.10")


def test_macos_gets_the_plain_build():
    found = {pin.name: pin for pin in pins(LOCK, mac())}
    assert found["torch"].version == "2.13.0" and len(found["torch"].hashes) >= 5
    assert cpu_pins(list(found.values()), mac()) == list(found.values())


def test_versions_differ_by_python():
    old = {pin.name: pin.version for pin in pins(LOCK, linux("3.10.1"))}
    new = {pin.name: pin.version for pin in pins(LOCK, linux("3.13.0"))}
    assert old["numpy"].startswith("2.2.") and new["numpy"] > old["numpy"]


def test_musl_is_refused_by_name():
    with pytest.raises(OrchError, match=r"torch has no wheels for musl.*Linux x86_64 \(musl 1\.2\)"):
        pins(LOCK, linux(libc=("musl", "1.2")))
    assert [pin.name for pin in pins("tiny==1.0 --hash=sha256:" + "0" * 64, linux(libc=("musl", "1.2")))] == ["tiny"]


def test_the_lock_names_no_host_and_hashes_everything():
    assert "://" not in LOCK and "--index" not in LOCK and "--find-links" not in LOCK
    assert not [line for line in LOCK.splitlines() if is_cuda_only(line)]


def test_all_problems_of_a_lock_are_told_with_their_lines():
    text = "tiny>=1.0\n# fine\n--index-url x\nother==1.0 --hash=md5:00\nbad req==\nlib @ file:///x\n"
    with pytest.raises(ConfigError) as caught:
        pins(text, linux(), where="envs/x/requirements.lock")
    lines = [problem.split(":")[1] for problem in caught.value.problems]
    assert lines == ["1", "3", "4", "5", "6"]
    assert caught.value.exit_code == 2


def test_a_name_pinned_twice_for_one_target_is_an_error():
    with pytest.raises(ConfigError, match="pinned a second time"):
        pins("tiny==1.0\nTiny==2.0\n", linux())
    only = pins("tiny==1.0 ; python_full_version < '3.11'\ntiny==2.0 ; python_full_version >= '3.11'\n", linux())
    assert [pin.version for pin in only] == ["2.0"]


def test_an_empty_lock_is_an_error():
    with pytest.raises(ConfigError, match="nothing is pinned"):
        pins("# nothing\n", linux())
    assert pins(f"{NOTHING}\n", linux()) == []  # one that says that it is empty is none


def test_ids_depend_on_pins_python_and_platform_alone():
    wanted = pins(LOCK, linux())
    again = pins("# a comment\n" + LOCK, linux())
    assert environment_id(wanted, linux()) == environment_id(again, linux())
    others = {
        environment_id(wanted, linux("3.11.3")),
        environment_id(wanted, linux(machine="aarch64")),
        environment_id(wanted, linux(libc=("glibc", "2.31"))),
        environment_id(wanted[1:], linux()),
        environment_id(wanted, linux()),
    }
    assert len(others) == 5 and all(len(name) == 16 for name in others)


def test_platform_tags_come_from_the_place():
    assert platforms(linux())[0] == "manylinux_2_36_x86_64"
    assert {"manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"} <= set(
        platforms(linux())
    )
    old = platforms(linux(libc=("glibc", "2.17"), machine="aarch64"))
    assert old == ["manylinux_2_17_aarch64", "manylinux2014_aarch64", "linux_aarch64"]
    assert platforms(linux(libc=("musl", "1.2")))[:3] == [
        "musllinux_1_2_x86_64",
        "musllinux_1_1_x86_64",
        "musllinux_1_0_x86_64",
    ]
    assert platforms(mac())[0] == "macosx_14_0_arm64"
    assert platforms(mac(release="25.1.0"))[0] == "macosx_26_0_arm64"
    with pytest.raises(OrchError, match="Windows"):
        platforms(Target("AMD64", "Windows", None, "3.11.2", ""))
    with pytest.raises(OrchError, match="C library"):
        platforms(linux(libc=None))


def test_which_wheels_fit():
    assert fits("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", linux())
    assert not fits("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", linux(libc=("glibc", "2.27")))
    assert not fits("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", linux("3.12.1"))
    assert not fits("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_aarch64.whl", linux())
    assert fits("x-1-cp39-abi3-manylinux_2_17_x86_64.whl", linux()) and fits("x-1-py3-none-any.whl", mac())
    assert fits("torch-2.13.0-cp312-cp312-macosx_14_0_arm64.whl", mac())
    assert not fits("torch-2.13.0-cp312-cp312-macosx_14_0_arm64.whl", mac(release="22.1.0"))
    assert not fits("x-1-cp313-cp313t-manylinux_2_17_x86_64.whl", linux("3.13.0"))
    assert str(tags(linux("3.12.1"))[0]) == "cp312-cp312-manylinux_2_36_x86_64"


def test_uv_is_told_the_platform():
    assert uv_platform(linux()) == "x86_64-manylinux_2_36"
    assert uv_platform(linux(libc=("glibc", "2.30"), machine="aarch64")) == "aarch64-manylinux_2_28"
    assert uv_platform(linux(libc=("musl", "1.2"))) == "x86_64-unknown-linux-musl"
    assert uv_platform(mac()) == "aarch64-apple-darwin"


def test_a_python_of_the_place_is_chosen():
    spec = SimpleNamespace(name="demo", python=">=3.10,<3.13")
    own, older, newer = ({"path": f"/{v}", "version": v} for v in ("3.11.2", "3.10.9", "3.12.1"))
    everything = [older, newer, {"path": "/3.14.0", "version": "3.14.0"}]
    assert choose_python(spec, Facts({"python": own, "pythons": everything})).version == "3.11.2"
    beyond = {"path": "/3.8.1", "version": "3.8.1"}
    assert choose_python(spec, Facts({"python": beyond, "pythons": everything})).version == "3.12.1"
    with pytest.raises(OrchError, match=r"demo needs Python >=3.10,<3.13, and the place has 3.8.1 \(/3.8.1\)"):
        choose_python(spec, Facts({"python": beyond, "pythons": []}))
    with pytest.raises(OrchError, match="the place has none"):
        choose_python(spec, Facts({"python": None, "pythons": None}))


def test_a_target_from_the_facts():
    facts = Facts({"machine": "aarch64", "system": "Linux", "libc": ["glibc", "2.31"], "kernel": "6.8.0"})
    target = target_of(facts, PythonAtPlace("/usr/bin/python3", "3.10.12"))
    assert target.abi == "cp310" and str(target) == "CPython 3.10 on Linux aarch64 (glibc 2.31)"


def test_auto_means_cpu_where_there_is_no_gpu():
    auto, cuda = SimpleNamespace(backend="auto"), SimpleNamespace(backend="cu128")
    with_gpu, without = Facts({"tools": {"nvidia-smi": {"path": "x"}}}), Facts({"tools": {"nvidia-smi": None}})
    assert wants_cpu(auto, without) and not wants_cpu(auto, with_gpu) and not wants_cpu(cuda, without)
    wanted = pins(f"torch==2.13.0\ntriton==3.0\nnvidia-cublas==1.0\ncuda-toolkit==1\nnumpy==2.0\n{'':s}", linux())
    assert [str(pin) for pin in cpu_pins(wanted, linux())] == ["numpy==2.0", "torch==2.13.0+cpu"]
