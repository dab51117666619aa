"""The checks of what a GPU needs: nvidia-smi, the driver's two halves, and the device nodes."""

from __future__ import annotations

import re
from collections import Counter

from orchestrator.doctor.model import Facts, Unread, Verdict, fault, ok, reading, unknown, warning
from orchestrator.place.container import KINDS
from orchestrator.place.greeting import driver_version
from orchestrator.remote import nvidia_smi

_MISMATCH = "Driver/library version mismatch"
_ABSENT = "nvidia-smi is not here"


def _kernel(facts: Facts) -> str | None:
    """The version of the kernel module: the host's, which a container sees too."""
    seen = None
    if facts.here is not None:
        seen = driver_version((facts.here.get("driver") or {}).get("value"))
    return seen or facts.host.get("driver")


def _gpus_here(facts: Facts) -> bool:
    """Whether anything at the place tells of a GPU. Raises Unread."""
    smi = reading(facts, "nvidia_smi")
    gpus = nvidia_smi.parse_gpus(smi.get("text") or "")
    return bool(gpus) or any(re.fullmatch(r"nvidia\d+", name) for name in reading(facts, "devices"))


def check_gpus(facts: Facts) -> Verdict:
    smi = reading(facts, "nvidia_smi")
    why = nvidia_smi.explain(smi)
    if why is None:
        gpus, problems = nvidia_smi.parse(smi["text"])
        broken = [gpu for gpu in gpus if gpu["name"] is None]
        if broken:
            raise Unread(f"nvidia-smi tells too little of GPU {broken[0]['index']} ({broken[0]['why'].get('name')})")
        kinds = Counter(str(gpu["name"]) for gpu in gpus)
        text = ", ".join(f"{count} × {name}" for name, count in kinds.items())
        return ok(text + (f" (also: {problems[0][:100]})" if problems else ""))
    if smi.get("why") != _ABSENT:
        raise Unread(why)
    kernel = _kernel(facts)
    if kernel is None and not facts.nodes and not _gpus_here(facts):
        return ok("none, and no driver")
    if facts.kind == "none" or _gpus_here(facts):
        engine = facts.kind in ("docker", "podman")
        remedy = _node(facts, "nvidia0") if engine else _user_space(facts, kernel)
        return warning(f"no nvidia-smi here{_of(kernel)}", *remedy)
    return warning(f"the host has GPUs{_of(kernel)}, this container has none", *_node(facts, "nvidia0"))


def _of(kernel: str | None) -> str:
    return f" (driver {kernel})" if kernel else ""


def _user_space(facts: Facts, kernel: str | None) -> tuple[str, ...]:
    archive = f"NVIDIA-Linux-x86_64-{kernel or 'VERSION'}.run"
    if facts.kind in ("docker", "podman"):
        # The toolkit brings the libraries in as the container starts.
        return (facts.on_host(KINDS[facts.kind].restart),)
    if facts.kind == "none":
        return (f"install the driver's libraries of version {kernel or 'VERSION'}, or reboot after an upgrade",)
    return (
        f"orch exec {facts.place} -- sh {archive} --silent --no-kernel-module",
        f"after an upgrade of the host: {facts.on_host('reboot')}, first",
    )


def check_driver(facts: Facts) -> Verdict:
    smi = reading(facts, "nvidia_smi")
    text = smi.get("text") or ""
    kernel = _kernel(facts)
    if _MISMATCH in text:
        library = re.search(r"library version: (\S+)", text)
        has = (
            f" (library {library.group(1)}{f', kernel module {kernel}' if kernel else ''})" if library else _of(kernel)
        )
        return fault(f"{_MISMATCH[0].lower()}{_MISMATCH[1:]}{has}", *_user_space(facts, kernel))
    libraries = reading(facts, "libcuda")
    if kernel is None:
        if not libraries and not _gpus_here(facts):
            return ok("none needed")
        raise Unread("no /proc/driver/nvidia/version tells the kernel module's version")
    if not libraries:
        if not _gpus_here(facts):
            return ok(f"the host's is {kernel}; nothing of it is here")
        raise Unread(f"kernel module {kernel}; no libcuda.so was found in the usual folders")
    if kernel not in libraries:
        return fault(
            f"kernel module {kernel}, library {', '.join(libraries)}: CUDA does not start", *_user_space(facts, kernel)
        )
    return ok(f"{kernel}, kernel module and library")


def check_uvm(facts: Facts) -> Verdict:
    found = reading(facts, "uvm")
    if found is None:
        if not _gpus_here(facts):
            return ok("none needed")
        return fault("/dev/nvidia-uvm is not there: CUDA finds no GPU, though nvidia-smi does", *_node(facts))
    if found.get("opens") is None:
        return unknown(str(found.get("why")))
    if not found["opens"]:
        return fault(f"/dev/nvidia-uvm cannot be opened: {found.get('why')}", *_node(facts))
    return ok("/dev/nvidia-uvm opens")


def _node(facts: Facts, name: str = "nvidia-uvm") -> tuple[str, ...]:
    """How a container gets a device node: made on the host, given to the container, and seen after a restart."""
    make = "nvidia-modprobe -u -c 0"
    if facts.kind == "none":
        return (facts.on_host(make),)
    steps = [] if name in facts.nodes else [facts.on_host(make)]
    if facts.kind == "pct":
        config = facts.host.get("config") or ()
        taken = {int(found.group(1)) for line in config if (found := re.match(r"dev(\d+):", line))}
        given = any(re.match(rf"dev\d+:.*/dev/{name}\b", line) or f"/dev/{name} " in line for line in config)
        if not given:
            free = next(number for number in range(256) if number not in taken)
            steps.append(facts.on_host(f"pct set {{id}} --dev{free} /dev/{name}"))
        return (*steps, facts.on_host(KINDS[facts.kind].restart))
    if facts.kind == "incus":
        device = "gpu gputype=physical" if name == "nvidia0" else f"unix-char source=/dev/{name} path=/dev/{name}"
        steps.append(facts.on_host(f"incus config device add {{id}} {name} {device}"))
        if name == "nvidia0":
            steps.append(facts.on_host("incus config set {id} nvidia.runtime=true nvidia.driver.capabilities=all"))
        return (*steps, facts.on_host(KINDS[facts.kind].restart))
    if facts.kind in ("docker", "podman"):
        # What a container sees of GPUs is settled when it is made.
        option = "--gpus all" if facts.kind == "docker" else "--device nvidia.com/gpu=all"
        if not facts.toolkit:
            steps.append("install NVIDIA's container toolkit (nvidia-container-toolkit) on the host")
        return (*steps, f"make the container anew with {facts.kind} run {option} …")
    entry = f"lxc.mount.entry = /dev/{name} dev/{name} none bind,optional,create=file"
    return (*steps, f"in the configuration of {facts.ident}: {entry}; then restart it")
