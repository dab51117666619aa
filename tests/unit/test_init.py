"""`orch init` without a machine: what it guesses and asks, and that what it writes loads and overwrites nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config import find_project, load_environment, load_hosts, load_recipe, resolve_place
from orchestrator.errors import UsageError
from orchestrator.init import hosts_text, recipe_text
from orchestrator.init.aliases import aliases
from orchestrator.init.asking import Answer, Asker
from orchestrator.init.containers import LIST, read
from orchestrator.init.environment import Choice, Gpu, choose
from orchestrator.init.hosts_text import Entry, added, host_name, new_file
from orchestrator.init.program import PYTHON, Needs, candidates, needs, words

few = settings(max_examples=60, deadline=None)
POINTER = "# yaml-language-server: $schema=.orch/schema/hosts.json"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A project folder whose home is empty."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    made = tmp_path / "project"
    made.mkdir()
    monkeypatch.chdir(made)
    return made


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


# -- the SSH configuration --


def test_every_alias_is_found_in_included_files_too(tmp_path):
    write(
        tmp_path,
        {
            "config": "Include conf.d/*\n# Host no\nHost a b *.lab !c\n  HostName=10.0.0.1\n  User me\n"
            'Match host x\n  Port 1\nhost "quoted"\nHost *\n  User all\nInclude missing\n',
            "conf.d/1": "Host inner\n\tHostName %h.example\n  Port 2222\nInclude conf.d/1\n",
            "conf.d/2": "HOST a\n  User other\n",
        },
    )
    found = {alias.name: alias.detail for alias in aliases(tmp_path / "config")}
    # a circle of files ends, and each name is there once
    assert found == {"inner": "inner.example:2222", "a": "other@10.0.0.1", "b": "me@10.0.0.1", "quoted": ""}
    assert aliases(tmp_path / "none") == []


# -- containers --


def test_the_hosts_own_lists_are_read():
    listed = read(
        {
            "pct": [
                "VMID       Status     Lock         Name                ",
                "200        running                 gpu-box             ",
                "201        stopped    backup       other               ",
            ],
            "incus": ["c1,RUNNING", ""],
            "docker": ["web,exited"],
            "sudo": ["pct"],
            "failed": ["podman"],
        }
    )
    assert [(one.kind, one.id, one.state, one.label) for one in listed.found] == [
        ("pct", "200", "running", "gpu-box"),
        ("pct", "201", "stopped", "other"),
        ("incus", "c1", "running", ""),
        ("docker", "web", "exited", ""),
    ]
    assert [one.running for one in listed.found] == [True, False, True, False]
    assert listed.sudo == {"pct"} and listed.failed == ("podman",)
    assert [(one.kind, one.id) for one in read({"lxc": ["NAME STATE", "box RUNNING"]}).found] == [("lxc", "box")]


FAKES = {
    "id": "echo 1500",
    "sudo": '[ "$1 $2" = "-n --" ] && shift 2 && AS_ROOT=1 exec "$@"',
    "pct": "printf 'VMID Status Lock Name\\n200 running box\\n'",
    "incus": "echo c1,RUNNING",
    "docker": '[ -n "$AS_ROOT" ] && echo web,running',
    "podman": "exit 125",
    "timeout": 'shift 3; exec "$@"',
}


def test_the_script_takes_sudo_where_it_is_needed(tmp_path):
    for name, line in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", LIST, "orch-list", "n0nce"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "n0nce pct VMID Status Lock Name",
        "n0nce pct 200 running box",
        "n0nce sudo pct",  # only root enters it, whoever may list it
        "n0nce incus c1,RUNNING",
        "n0nce docker web,running",
        "n0nce sudo docker",
        "n0nce failed podman",
        "n0nce end 1",
    ]


# -- the program --


def test_a_command_is_guessed_from_the_folder(tmp_path):
    assert candidates(tmp_path) == []
    write(tmp_path, {"only.py": "", "setup.py": ""})
    assert candidates(tmp_path) == [[PYTHON, "only.py"]]
    write(tmp_path, {"main.py": "", "train.py": "", "run.sh": "", "pkg/__init__.py": "", "pkg/__main__.py": ""})
    assert candidates(tmp_path) == [
        [PYTHON, "train.py"],
        [PYTHON, "main.py"],
        ["sh", "run.sh"],
        [PYTHON, "-m", "pkg"],
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("python train.py --lr 1e-4", [PYTHON, "train.py", "--lr", "1e-4"]),
        ("python3.11 -m pkg", [PYTHON, "-m", "pkg"]),
        ("train.py 'a b'", [PYTHON, "train.py", "a b"]),
        ("sh run.sh", ["sh", "run.sh"]),
        ("""train.py 'a; b' "\\"&" \\$HOME a=b""", [PYTHON, "train.py", "a; b", '"&', "$HOME", "a=b"]),
    ],
)
def test_words_of_a_command(text, found):
    assert words(text) == found


@pytest.mark.parametrize("text", ["", "  ", "sh 'open"])
def test_no_command_is_a_sentence(text):
    with pytest.raises(UsageError, match="the command"):
        words(text)


@pytest.mark.parametrize("text", ["cd src && python t.py", "python t.py >log", "python t.py 'a' $DATA", "a; b"])
def test_what_only_a_shell_understands_is_no_word_of_a_command(text):
    with pytest.raises(UsageError, match="only a shell understands"):
        words(text)


def test_variables_before_a_command_belong_into_the_recipe():
    with pytest.raises(UsageError, match="env: in the recipe") as caught:
        words("CUDA_VISIBLE_DEVICES=0 python train.py --lr 1")
    assert caught.value.hint == "orch init --command 'python train.py --lr 1'"


def test_what_a_program_imports_is_what_it_needs(tmp_path):
    write(
        tmp_path,
        {
            "train.py": "import os, numpy.linalg\nfrom lib import model\nfrom lib.deep import x\nimport helper\n"
            "try:\n    import wandb\nexcept ImportError:\n    wandb = None\n"
            "def f():\n    import PIL\n",
            "lib/__init__.py": "",
            "lib/model.py": "import torch\nfrom . import deep\n",
            "lib/deep.py": "from sklearn import svm\nprint('$ORCH_METRICS')\n",
            "helper.py": "import yaml, broken_name\n",
            "unused.py": "import nothing_of_this\n",
        },
    )
    found = needs(tmp_path, [PYTHON, "train.py"])
    assert found.requirements == ("broken-name", "numpy", "pillow", "pyyaml", "scikit-learn", "torch")
    assert found.said_by == "train.py" and found.metrics
    assert needs(tmp_path, [PYTHON, "missing.py"]) == Needs()
    write(tmp_path, {"requirements.txt": "# a list\n-r more.txt\nNumPy>=2\nscikit_learn\n", "bad.py": "import ("})
    found = needs(tmp_path, [PYTHON, "-m", "helper"])
    assert found.requirements == ("NumPy>=2", "scikit_learn", "broken-name", "pyyaml")
    assert found.said_by == "requirements.txt and helper.py" and not found.metrics
    assert needs(tmp_path, [PYTHON, "bad.py"]).requirements == ("NumPy>=2", "scikit_learn")


def test_a_projects_own_dependencies_are_read(tmp_path):
    write(
        tmp_path, {"pyproject.toml": '[project]\nname = "x"\ndependencies = ["einops>=0.8"]\n', "train.py": "import x"}
    )
    assert needs(tmp_path, [PYTHON, "train.py"]).requirements == ("einops>=0.8", "x")


# -- the environment --


@pytest.mark.parametrize(
    ("wanted", "gpu", "name", "backend"),
    [
        ((), Gpu(True, 580), "plain", "auto"),
        (("torch",), Gpu(False), "demo", "auto"),
        (("torch", "numpy>=2"), Gpu(True, 580), "torch", "auto"),
        (("torch",), Gpu(), "torch", "auto"),
        (("torch",), Gpu(True, None), "torch", "auto"),
        (("torch",), Gpu(True, 570), "mine", "cu128"),
        (("torch",), Gpu(True, 535), "mine", "cu126"),
        (("torch==2.10.0",), Gpu(False), "mine", "cpu"),
        (("transformers", "torch"), Gpu(False), "demo", "auto"),
        (("transformers", "torch"), Gpu(True, 580), "mine", "auto"),
        (("einops",), Gpu(False), "mine", "cpu"),
        (("torch[opt]",), Gpu(), "mine", "auto"),
    ],
)
def test_the_smallest_environment_that_will_do(folder, wanted, gpu, name, backend):
    found = choose(find_project(), Needs(wanted, "train.py"), gpu, "mine")
    assert (found.name, found.backend, found.own) == (name, backend, name == "mine")
    assert load_environment(find_project(), name).name == name if name != "mine" else found.requirements


@pytest.mark.parametrize(
    ("line", "torch", "backend", "written"),
    [
        ("torch", "2.13.0", "cpu", "torch==2.13.0"),
        ("torch>=2.1", "2.13.0", "cpu", "torch==2.13.0"),
        ("torch==2.10.0+cu128", "2.10.0", "cpu", "torch==2.10.0"),
        ("torch<2.5,>=2.1", "<2.5,>=2.1", "auto", "torch<2.5,>=2.1"),
    ],
)
def test_the_spec_of_a_new_environment_agrees_with_what_is_asked_of_torch(folder, line, torch, backend, written):
    found = choose(find_project(), Needs((line, "einops"), "x"), Gpu(False), "mine")
    assert (found.torch, found.backend, found.requirements) == (
        torch,
        backend,
        (written, "einops", "numpy  # torch warns where it is missing"),
    )


def test_one_of_the_projects_own_goes_first(folder):
    write(
        folder,
        {
            "recipes/envs/other/requirements.lock": "einops==0.8.1 \\\n    --hash=sha256:0\ntorch==2.13.0+cpu ; x\n",
            "recipes/envs/other/spec.yaml": "python: '3.11'\ntorch: 2.13.0\nbackend: cpu\n",
        },
    )
    project = find_project()
    assert choose(project, Needs(("torch", "einops<1")), Gpu(False), "mine").name == "other"
    assert choose(project, Needs(("einops<0.8",)), Gpu(False), "mine").name == "mine"


def test_an_environment_that_is_written_is_one(folder):
    choice = Choice("mine", "", ("einops", "torch==2.11.0"), "2.11.0", "cu128")
    write(
        folder,
        {
            "recipes/envs/mine/spec.yaml": recipe_text.spec(choice),
            "recipes/envs/mine/requirements.in": recipe_text.requirements(choice),
            "recipes/envs/mine/requirements.lock": "",
        },
    )
    spec = load_environment(find_project(), "mine")
    assert (spec.torch, spec.backend, spec.index_hashes) == ("2.11.0", "cu128", False)
    assert recipe_text.requirements(choice).splitlines()[1:] == ["einops", "torch==2.11.0"]


# -- hosts.yaml --

ENTRIES = [
    Entry("pve", "pve", "200", "pct"),
    Entry("pve", "root@192.0.2.1:2222", "train", "lxc"),
    Entry("box", "me@[2001:db8::1]:22", "c1", "docker", sudo=True),
    Entry("box", "ssh://me@box.example"),
    Entry("local", None),
    Entry("local", None, "c1", "podman"),
    Entry("10.0", "10.0"),
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_new_file_says_what_was_meant_also_without_its_comments(folder, entry):
    text = new_file(entry, POINTER)
    (folder / "hosts.yaml").write_text(text)
    hosts = load_hosts(find_project())
    assert hosts[entry.name] == entry.host()
    assert resolve_place(hosts, entry.place).name == entry.place
    # each key that stands there as a comment may be taken in
    lines = [
        line.replace("# ", "", 1) if line.lstrip().startswith("# ") and ":" in line else line
        for line in text[len(POINTER) :].splitlines()
    ]
    if entry.name != "local":
        (folder / "hosts.yaml").write_text("\n".join(lines[lines.index("hosts:") :]))
        assert load_hosts(find_project())[entry.name].root == "/srv/orch"
    assert max(map(len, text.splitlines())) <= 92


OLD = """\
# mine
hosts:   # all of them
    local: {}
    # the big one
    pve:
        ssh: root@192.0.2.1  # by address
        containers:
            200: {kind: pct}
            # 201: later

    # a last word
"""


@pytest.mark.parametrize(
    ("old", "entry", "line"),
    [
        (OLD, Entry("box", "box", "c", "lxc"), "    box:"),
        (OLD, Entry("pve", "pve", "300", "pct"), "            300: {kind: pct}"),
        (
            OLD.replace("        containers:\n            200: {kind: pct}\n", ""),
            Entry("pve", "pve", "300", "pct"),
            None,
        ),
        ("hosts:\n", Entry("box", "box"), "  box:"),
        ("# nothing yet\n", Entry("box", "box"), "  box:"),
        ("hosts:\n  a:\n    ssh: a", Entry("box", "box"), "  box:"),
        ("hosts:\n  a:\n    ssh: a\nx: &y 1\n".replace("x: &y 1\n", ""), Entry("b", "b", "200", "pct"), "  b:"),
    ],
)
def test_a_host_is_added_and_all_else_stays(folder, old, entry, line):
    (folder / "hosts.yaml").write_text(old)
    before = load_hosts(find_project())
    text = added(find_project(), entry)
    assert text is not None and (line is None or line in text.splitlines())
    kept = iter(text.splitlines())
    assert all(one in kept for one in old.splitlines())  # in their order
    (folder / "hosts.yaml").write_text(text)
    after = load_hosts(find_project())
    assert {name: host for name, host in after.items() if name != entry.name} == {
        name: host for name, host in before.items() if name != entry.name
    }
    assert (
        resolve_place(after, entry.place).container == resolve_place({entry.name: entry.host()}, entry.place).container
    )
    assert [path.name for path in folder.iterdir()] == ["hosts.yaml"]


@pytest.mark.parametrize("old", ["hosts: {a: {ssh: a}}\n", "hosts:\n  pve: {ssh: x}\n", "hosts: {}\n"])
def test_what_cannot_be_edited_as_text_is_told(folder, old):
    (folder / "hosts.yaml").write_text(old)
    entry = Entry("pve", "pve", "200", "pct")
    assert added(find_project(), entry) is None
    (folder / "hosts.yaml").write_text("hosts:\n" + hosts_text.piece(entry))
    assert load_hosts(find_project())["pve"] == entry.host()


@pytest.mark.parametrize(
    ("ssh", "name"),
    [
        ("pve", "pve"),
        ("GPU_Box.lab", "gpu_box.lab"),
        ("root@gpu.example.org:22", "gpu"),
        ("root@192.0.2.1", "192.0.2.1"),
        ("local", "local-ssh"),
        ("me@[2001:db8::1]", "2001-db8-1"),
        ("_", "host"),
    ],
)
def test_a_host_gets_a_name(ssh, name):
    assert host_name(ssh) == name


# -- the recipe --

TEXTS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=30)


def make_recipe(command, metrics=False, environment=None):
    return recipe_text.recipe(
        name="train",
        project="a: b # c",
        place="pve/200",
        environment=environment or Choice("plain", ""),
        command=command,
        needs=Needs(said_by="train.py", metrics=metrics),
        pointer=POINTER,
    )


@few
@given(st.lists(TEXTS, min_size=1, max_size=6), st.booleans())
def test_any_command_is_written_as_it_is(tmp_path_factory, command, metrics):
    root = tmp_path_factory.mktemp("project")
    write(root, {"recipes/train.yaml": make_recipe(command, metrics)})
    recipe = load_recipe(find_project(root), "train")
    assert recipe.command == command and recipe.metrics == metrics and recipe.place == "pve/200"
    assert recipe.code is not None and recipe.code.path == str(root)


@pytest.mark.parametrize(("metrics", "environment", "gpus"), [(True, "plain", "none"), (False, "torch", "1")])
def test_what_stands_there_as_a_comment_may_be_taken_in(folder, metrics, environment, gpus):
    text = make_recipe([PYTHON, "train.py"], metrics, Choice(environment, ""))
    assert max(map(len, text.splitlines())) <= 92
    head, _, tail = text.partition("metrics: ")
    whole = (
        head
        + "metrics: "
        + "\n".join(
            line.removeprefix("# ") if line.startswith("# ") else line[1:] if line.startswith("#") else line
            for line in tail.splitlines()
        )
    )
    write(folder, {"recipes/train.yaml": whole})
    recipe = load_recipe(find_project(), "train")
    assert recipe.env == {"OMP_NUM_THREADS": "8"} and recipe.secrets == ["HF_TOKEN"] and recipe.stop_grace == 120
    assert recipe.health.step == (50 if metrics else None)
    assert recipe.gpus == gpus


@given(TEXTS)
@few
def test_every_folder_gives_a_recipe_a_name(text):
    import re

    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,39}", recipe_text.recipe_name(text))


# -- questions --


def asker(*lines, terminal=True, yes=False):
    told, answers = [], iter(lines)

    def ask(prompt):
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    return Asker(ask, told.append, terminal, yes), told


ANSWERS = [Answer("200", "200", "running"), Answer("none", "none", "the host itself")]


def test_a_question_takes_a_number_a_name_or_nothing():
    def choose_one(*lines, default=0, **more):
        return asker(*lines)[0].choose("Which", ANSWERS, default, "--x 1", free="a name", **more)

    assert [choose_one(line) for line in ("1", "2", "none", "", "other")] == ["200", "none", "none", "200", "other"]
    assert choose_one("7", "2") == "none" and choose_one("7", numbers=True) == "7"
    assert choose_one("", "2", default=None) == "none"
    with pytest.raises(UsageError, match="nothing was written"):
        choose_one(default=None)
    assert asker("maybe", "n")[0].sure("Go on?", "--x", default=True) is False


def test_without_a_terminal_the_option_is_named():
    one, told = asker(terminal=False)
    with pytest.raises(UsageError, match="stdin is no terminal") as caught:
        one.choose("Which", ANSWERS, 0, "--container 200", free="")
    assert "200, none" in caught.value.message and caught.value.hint.startswith("orch init --container 200, or --yes")
    one, told = asker(terminal=False, yes=True)
    assert one.choose("Which", ANSWERS, 1, "-x", free="") == "none" and one.sure("?", "-x", default=True)
    with pytest.raises(UsageError, match="does not choose among several"):
        one.choose("Which", ANSWERS, None, "-x", free="")
    assert told == []


# -- the command, at this machine's expense alone --


def orch(folder, *words, code=0):
    argv = [sys.executable, "-c", "from orchestrator.cli import main; main()", *words]
    done = subprocess.run(
        argv, cwd=folder, env={**os.environ}, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
    )
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def test_the_command_writes_what_loads_and_overwrites_nothing(folder):
    write(folder, {"hosts.yaml": "# mine\nhosts:\n  local: {}\n"})  # whatever lies above this folder
    base = ("init", "me@192.0.2.7/200", "--no-check")
    assert "--command 'python train.py'" in orch(folder, *base, code=2)
    assert [path.name for path in folder.iterdir()] == ["hosts.yaml"]
    told = orch(folder, *base, "--yes")
    assert "  changed      hosts.yaml (192.0.2.7/200 was added)" in told and "orch doctor 192.0.2.7/200" in told
    recipe = load_recipe(find_project(), "train")
    assert (recipe.place, recipe.environment, recipe.metrics) == ("192.0.2.7/200", "plain", True)
    assert (folder / "hosts.yaml").read_text().startswith("# mine\nhosts:\n  local: {}\n  192.0.2.7:\n")
    for name in ("recipe", "hosts", "environment"):
        assert (folder / f".orch/schema/{name}.json").is_file()
    head = (folder / "recipes/train.yaml").read_text().splitlines()[0]
    assert (folder / "recipes" / head.partition("$schema=")[2]).resolve() == folder / ".orch/schema/recipe.json"

    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "train.py").write_text("import torch\n")
    files[folder / "train.py"] = b"import torch\n"
    again = orch(folder, "init", "me@192.0.2.7", "--no-check", "--yes")  # the container that hosts.yaml names
    assert again.count("  kept  ") == 2 and "it has 192.0.2.7/200 already" in again
    told = orch(folder, "init", "local", "-c", "none", "--no-check", "--yes")
    assert told.count("  kept  ") == 2 and "place: local\n" in told and "environment: torch\n" in told
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files
    assert "did you mean" in orch(folder, "init", "local", "-c", "none", "--no-check", "-y", "-e", "toch", code=2)
    assert "--container says" in orch(folder, "init", "pve/200", "-c", "201", "--no-check", "-y", code=2)
    assert "is neither" in orch(folder, "init", "a b", "--no-check", "-y", code=2)


def test_schemas_are_made_anew_where_files_point_to_them(folder):
    from orchestrator import schema_files

    write(folder, {"hosts.yaml": "hosts:\n"})
    assert "recipes/NAME.yaml: # yaml-language-server" in orch(folder, "schema", "--write")
    schemas = sorted((folder / ".orch/schema").iterdir())
    schema_files.refresh(find_project())
    for path in schemas:
        path.unlink()
    schema_files.refresh(find_project())
    assert not any(path.exists() for path in schemas)  # nothing points there
    hosts = folder / "hosts.yaml"
    hosts.write_text(f"{schema_files.pointer(hosts, folder, 'hosts')}\nhosts:\n")
    schema_files.refresh(find_project())
    assert all(path.exists() for path in schemas)
    schemas[0].write_text("{}")
    schema_files.refresh(find_project())
    assert len(schemas[0].read_text()) > 100
