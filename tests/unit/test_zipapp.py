"""The remote programs: one zipapp, for every Python from 3.8 on."""

from __future__ import annotations

import ast
import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from orchestrator.remote import frames, zipapp

REMOTE = Path(zipapp.__file__).parent
MODULES = sorted(path.name for path in REMOTE.glob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_python_3_8(name):
    ast.parse((REMOTE / name).read_text("utf-8"), filename=name, feature_version=(3, 8))


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports_the_standard_library_alone(name):
    known = sys.stdlib_module_names
    for node in ast.walk(ast.parse((REMOTE / name).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] in known for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert (node.module or "").split(".")[0] in known


@pytest.mark.parametrize("path", sorted(REMOTE.glob("*.sh")), ids=lambda path: path.name)
def test_every_script_is_ascii_and_small(path):
    assert len(path.read_bytes().decode("ascii")) < 16_000


def test_the_same_sources_make_the_same_bytes():
    first = zipapp.build()
    zipapp.build.cache_clear()
    assert zipapp.build() == first
    names = zipfile.ZipFile(io.BytesIO(first[0])).namelist()
    assert names == sorted(names) and "remote/serve.py" in names and "remote/zipapp.py" not in names


def old_python():
    roots = [Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"]
    found = [str(path) for root in roots for path in sorted(root.glob("3.8.*/bin/python3.8"))]
    return found[0] if found else shutil.which("python3.8")


def hello(python: str, app: Path, root: Path) -> dict:
    done = subprocess.run(
        [python, "-IS", "-X", "utf8", str(app), "serve", "nonce", str(root)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=60,
    )
    noise, mark, rest = done.stdout.partition(b"\nnonce serve\n")
    assert mark and not noise
    return frames.Decoder().feed(rest)[0][0]["hello"]["container"]


@pytest.fixture
def app(tmp_path):
    path = tmp_path / "app.pyz"
    path.write_bytes(zipapp.build()[0])
    return path


def test_it_says_hello_on_python_3_8(app, tmp_path):
    python = old_python()
    if python is None:
        pytest.skip("there is no Python 3.8 on this machine")
    assert hello(python, app, tmp_path)["python"]["version"].startswith("3.8.")


def test_modules_are_unpacked_once_and_mended(app, tmp_path):
    assert hello(sys.executable, app, tmp_path)["root"] == str(tmp_path)
    folder = tmp_path / "app.pyz.modules"
    assert list((folder / "remote" / "__pycache__").glob("*.pyc"))
    # As a crash of the machine may leave it.
    (folder / "remote" / "facts.py").write_text("")
    hello(sys.executable, app, tmp_path)
    assert (folder / "remote" / "facts.py").read_bytes() == (REMOTE / "facts.py").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} <= {"app.pyz", "app.pyz.modules", "bin", "tmp"}


def test_it_works_where_nothing_can_be_unpacked(app, tmp_path):
    (tmp_path / "app.pyz.modules").write_text("in the way")
    assert hello(sys.executable, app, tmp_path)["python"]["version"]


def test_wrong_arguments_are_told(app):
    done = subprocess.run([sys.executable, str(app), "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage" in done.stderr
