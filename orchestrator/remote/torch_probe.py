"""The server's operation that looks at the torch of an environment: what it is, and what can go wrong with it.

torch is never imported here. `torch_inside` and `torch_ways` are laid into a folder of their own and run by the
environment's Python; the folder goes with the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from . import environment_state, spawn
from .frames import OpError
from .rundir import RunDir, list_runs, read_json

if TYPE_CHECKING:
    from .serve import Call

SCRIPTS = ("torch_inside.py", "torch_ways.py")
_TELLING = ("TORCH", "PYTORCH", "TRITON", "AOT_", "PT2_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONWARNINGS")
_AT_START = {"TORCH_COMPILE_DISABLE": {"TORCH_COMPILE_DISABLE": "1"}}  # ways that take variables at the start


def torch_probe(args: Dict[str, Any], call: Call) -> Dict[str, Any]:
    """`{id or null, python or null, seconds}` -> what `torch_inside` found, and beside it `python` (its path),
    `variables` (those of the environment that torch may heed, each {"name", "value", "from"}), `run` (whose
    variables they are, null for none) and `why` (null, or what kept the rest from being read).

    Of an environment the Python is started with the variables of its newest run, else with none; a Python given by
    path is started with this server's own.
    """
    ident, python = args.get("id"), args.get("python")
    if ident:
        python = os.path.join(environment_state.path_of(call.root, ident), "bin", "python")
    if not isinstance(python, str) or not os.path.isabs(python):
        raise OpError("usage", "%r is not the path of a Python" % (python,))
    if not (os.path.isfile(python) and os.access(python, os.X_OK)):
        raise OpError("not_found", "there is no program %s" % python)
    run, variables = _of_newest_run(call.root, ident) if ident else (None, dict(os.environ))
    answer: Dict[str, Any] = {"python": python, "run": run, "why": None}
    import shutil
    import tempfile  # here, since every session imports this module and few probe

    source = "run %s" % run if run else "the place"
    answer["variables"] = [
        {"name": name, "value": value, "from": source}
        for name, value in sorted(variables.items())
        if name.startswith(_TELLING)
    ]
    folder = tempfile.mkdtemp(prefix="orch-probe-")
    try:
        answer.update(_ask(python, variables, folder, float(args.get("seconds") or 240.0), call))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return answer


def _of_newest_run(root: str, ident: str) -> Tuple[Optional[str], Dict[str, str]]:
    """The newest run that used the environment, and the variables that its trainer had, its secrets aside."""
    for run in list_runs(root):
        state, _ = run.state()
        if state and state.get("environment") == ident:
            launch, _ = read_json(run.file("launch.json"))
            if launch is not None:
                return run.run, spawn.environment(launch, run, {})
    return None, spawn.environment({}, RunDir(os.path.join(root, "runs", "none")), {})


def _ask(python: str, variables: Dict[str, str], folder: str, seconds: float, call: Call) -> Dict[str, Any]:
    """The answer of the script, and of the ways that need a process from its start. A `why` where there is none."""
    import pkgutil

    for name in SCRIPTS:
        with open(os.path.join(folder, name), "wb") as file:
            file.write(pkgutil.get_data(__package__ or "remote", name) or b"")
    own = dict(variables, TORCHINDUCTOR_CACHE_DIR=folder, TORCHINDUCTOR_COMPILE_THREADS="1", TMPDIR=folder)
    for name in ("ORCH_RUN_ID", "ORCH_RUN_DIR", "ORCH_METRICS"):
        own.pop(name, None)
    end = time.monotonic() + seconds
    found, why = _run(python, own, folder, [], end, call)
    if found is None:
        return {"why": why}
    for way, more in _AT_START.items() if "ways" in found else ():
        again, why = _run(python, dict(own, **more), folder, [way], end, call)
        rows = (again or {}).get("ways")
        found["ways"] += rows or [{"cell": way + " loose", "why": why or "it gave no answer"}]
    return found


def _run(
    python: str, variables: Dict[str, str], folder: str, words: List[str], end: float, call: Call
) -> Tuple[Optional[Dict[str, Any]], Optional[str]]:
    """The script's answer, or why there is none."""
    path = os.path.join(folder, "answer-%d.json" % len(os.listdir(folder)))
    said = os.path.join(folder, "said")
    with open(said, "wb") as log:
        try:
            child = subprocess.Popen(
                [python, "-B", "-W", "ignore", os.path.join(folder, SCRIPTS[0]), path, *words],
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            return None, "%s does not start: %s" % (python, error.strerror)
    call.children.append(child)
    try:
        told = None
        while child.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            now = _read(path + ".progress")
            if now and now != told:
                told = now
                call.event({"step": "trying", "done": now[0], "total": now[1], "unit": "questions"})
        late = child.poll() is None
        if late:
            os.killpg(child.pid, 9)
            child.wait()
    finally:
        call.children.remove(child)
    answer = _read(path)
    if isinstance(answer, dict):
        return answer, None
    if late:
        return None, "it had not answered when the time was up"
    with open(said, encoding="utf-8", errors="replace") as file:
        lines = file.read()[-4000:].strip().splitlines()
    ended = "signal %d" % -child.returncode if child.returncode < 0 else "exit %d" % child.returncode
    return None, "%s ended with %s%s" % (python, ended, ": " + lines[-1].strip()[:300] if lines else "")


def _read(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


OPS = {"torch_probe": torch_probe}
