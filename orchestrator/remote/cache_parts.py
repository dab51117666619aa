"""The parts of a compile cache's key that only the place knows: its GPUs, its processor, the files of torch there."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Dict, List, Optional

from . import environment_state, nvidia_smi
from .facts import read_text

# What the generated C++ is built for (torch's vector instruction sets, and what its kernels ask for by themselves).
INSTRUCTION_SETS = (
    "amx_bf16",
    "amx_fp16",
    "amx_int8",
    "amx_tile",
    "asimd",
    "asimddp",
    "avx2",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx512f",
    "bf16",
    "fma",
    "sve",
    "sve2",
    "vsx",
    "vx",
)
CPU_THREADS = "cpu threads"  # an entry of config
_CODE = re.compile(r".*\.(?:py|so(?:\.[0-9.]+)?)\Z")
_SITE = re.compile(r"(?:.*/)?site-packages/")


class Unknown(Exception):
    """A part could not be read: one sentence why."""


def complete(root: str, parts: Dict[str, Any], environment: Optional[str]) -> Dict[str, Any]:
    """The parts with those filled in that are None. Raises Unknown, and OpError for what is no environment's id."""
    done = dict(parts)
    if done.get("gpu") is None:
        done["gpu"] = gpu_names()
    cpu = not done["gpu"]
    if not cpu:  # only C++ is built for a number of threads
        done["config"] = {name: value for name, value in (done.get("config") or {}).items() if name != CPU_THREADS}
    if done.get("instruction_set") is None:
        done["instruction_set"] = instruction_sets() if cpu else []
    path = environment_state.path_of(root, environment) if environment is not None else ""
    if done.get("environment_path") is None:
        done["environment_path"] = path if cpu else ""
    if done.get("torch_files") is None or done.get("triton_files") is None:
        manifest = environment_state.read_manifest(path) if path else None
        if manifest is None:
            raise Unknown("environment %s tells of no files" % environment)
        for part, owner in (("torch_files", "torch"), ("triton_files", "triton")):
            if done.get(part) is None:
                done[part] = files_digest(manifest, owner)
    return done


def gpu_names() -> List[str]:
    """The distinct names of the GPUs here, sorted; none where there is no nvidia-smi. Raises Unknown."""
    if not nvidia_smi.here():
        return []
    query = nvidia_smi.Query()
    query.wait()
    why = nvidia_smi.explain(query.outcome())
    if why is not None:
        raise Unknown(why)
    names = {gpu["name"] for gpu in nvidia_smi.parse_gpus(query.text or "")}
    if None in names:
        raise Unknown("nvidia-smi does not name every GPU")
    return sorted(str(name) for name in names)


def instruction_sets(text: Optional[str] = None) -> List[str]:
    """Those of INSTRUCTION_SETS that the processor has. Raises Unknown. `text`: of /proc/cpuinfo."""
    if text is None:
        try:
            text = read_text("/proc/cpuinfo")
        except OSError as error:
            raise Unknown("/proc/cpuinfo cannot be read (%s)" % error.strerror) from None
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = found.group(1).split() if found else []
    return sorted(set(flags) & set(INSTRUCTION_SETS))


def files_digest(manifest: Dict[str, Any], owner: str) -> str:
    """16 hex digits over the code that a distribution has in an environment (path within site-packages, sha256); ""
    where it has none. It is what Inductor and Triton digest themselves, by content and not by version."""
    rows = []
    for name, row in (manifest.get("files") or {}).items():
        if len(row) == 4 and row[3] == owner and row[2] and _CODE.match(name):
            rows.append([_SITE.sub("", name, 1), row[2]])
    if not rows:
        return ""
    return hashlib.sha256(json.dumps(sorted(rows), separators=(",", ":")).encode("ascii")).hexdigest()[:16]
