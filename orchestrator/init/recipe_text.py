"""A recipe and an environment as `orch init` writes them: what was chosen, and beside it what can be said too."""

from __future__ import annotations

import re
from collections.abc import Sequence

from orchestrator.config.models import RECIPE_NAME
from orchestrator.init.environment import PLAIN, Choice
from orchestrator.init.program import PYTHON, Needs

_WIDTH = 92
_WORD = re.compile(r"[A-Za-z0-9_./=][A-Za-z0-9_./=@+-]*")


def recipe_name(text: str) -> str:
    """A recipe's name made of a file's or folder's."""
    name = re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-_")[:40]
    return name if re.fullmatch(RECIPE_NAME, name) else "train"


def recipe(
    *, name: str, project: str, place: str, environment: Choice, command: Sequence[str], needs: Needs, pointer: str
) -> str:
    """The text of recipes/NAME.yaml. `pointer` is the line for editors, `project` the folder's name."""
    started = " ".join(word for word in command if word != PYTHON) or command[0]
    rows = [
        ("place", _text(place), "HOST or HOST/CONTAINER of hosts.yaml; --place takes another"),
        ("environment", _text(environment.name), _environment(environment)),
        ("code", ".", "this project travels, as git sees it, with uncommitted changes"),
    ]
    # without a package nothing uses a GPU
    no_gpu = environment.name == PLAIN and bool(needs.said_by)
    if no_gpu:
        rows.append(("gpus", "none", "or a number, all, or a list such as [0, 1]"))
    width = max(len(f"{key}: {value}") for key, value, _ in rows) + 2
    lines = [
        pointer,
        f"# What `orch launch {name}` does; `orch schema recipe` has every key.",
        "# Words in braces are known at launch: {python} is the environment's Python, {code} where",
        "# this project lies there, {run_dir} where a run's files go.",
        f"description: {_text(f'{started[:50]} of {project[:30]}')}",
        *(f"{f'{key}: {value}'.ljust(width)}# {comment}" for key, value, comment in rows),
        *_command(command),
        "",
        *_metrics(needs.metrics),
        "",
        *([] if no_gpu else ["# gpus: 1              # how many it uses; all of the place's otherwise"]),
        "# env:                 # environment variables of the program; always text",
        "#   OMP_NUM_THREADS: 8",
        "# secrets: [HF_TOKEN]  # taken from your environment at launch, and written nowhere",
        "# stop_grace: 120      # seconds that `orch stop` leaves it to save its work",
    ]
    return "\n".join(lines) + "\n"


def _environment(environment: Choice) -> str:
    if environment.own:
        return f"recipes/envs/{environment.name}; after a change there: orch env lock {environment.name}"
    if environment.name == PLAIN:
        return "no packages; once the program imports some, run `orch init` again"
    return "comes with orch; once the program imports more, run `orch init` again"


def _command(command: Sequence[str]) -> list[str]:
    line = f"command: [{', '.join(_flow(word) for word in command)}]"
    return [line] if len(line) <= _WIDTH else ["command:", *(f"  - {_flow(word)}" for word in command)]


def _metrics(there: bool) -> list[str]:
    if there:
        return [
            "metrics: true          # the program appends its progress to the file $ORCH_METRICS",
            "# health:",
            "#   step: 50           # from this step on a run counts as healthy",
        ]
    return [
        "# true, once the program appends lines to the file $ORCH_METRICS, such as",
        '# {"step": 5, "loss": 2.1, "tokens": 4096, "time": 1764547200.0}:',
        "# step, loss and throughput are then shown, and a run that hangs is noticed.",
        "metrics: false",
    ]


def spec(environment: Choice) -> str:
    """The text of an environment's spec.yaml."""
    builds = {
        "cpu": "torch's build for CPUs; auto takes its usual one where there is an NVIDIA GPU",
        "auto": "torch's usual build where there is an NVIDIA GPU, else that for CPUs",
    }
    note = builds.get(environment.backend, "torch's build, for the driver of the GPUs there")
    lines = [
        "# Which Pythons and which build of torch the packages of requirements.in are locked for.",
        'python: ">=3.10,<3.14"',
        f'torch: "{environment.torch}"',
        f"backend: {environment.backend}  # {note}",
    ]
    if environment.backend in builds:
        lines += [
            "# A CPU build that the lock has no hash of is taken by the hash that its index states.",
            "index_hashes: true",
        ]
    return "\n".join(lines) + "\n"


def requirements(environment: Choice) -> str:
    """The text of its requirements.in."""
    head = f"# What the program needs. After a change: orch env lock {environment.name}"
    return "\n".join([head, *environment.requirements]) + "\n"


def quoted(text: str) -> str:
    """Any text in double quotes, as YAML reads them."""
    escapes = {'"': '\\"', "\\": "\\\\"}

    def one(character: str) -> str:
        code = ord(character)
        plain = character if character.isprintable() else f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"
        return escapes.get(character, plain)

    return f'"{"".join(map(one, text))}"'


def _text(text: str) -> str:
    """Text as the value of a key."""
    plain = re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./ -]*[A-Za-z0-9_./-]|[A-Za-z0-9]", text)
    return text if plain and text.lower() not in ("null", "~") else quoted(text)


def _flow(text: str) -> str:
    """Text as a word of a list in brackets."""
    return text if _WORD.fullmatch(text) and text.lower() != "null" else quoted(text)
