"""A user's own tree as code: what of it travels, what never does, and that the place digests it alike."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import generations
from orchestrator.config import dump_recipe, find_project, load_recipe, parse_recipe, recipe_digest
from orchestrator.errors import ConfigError, UsageError
from orchestrator.remote import codetree, files
from orchestrator.tree import snapshot_tree

LARGEST = "64MiB"


def git(folder, *words):
    name = ("-c", "user.name=tester", "-c", "user.email=tester@example.org", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", *name, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write(root, *names, text=""):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text or name)
    return root


def repository(root, *names):
    write(root, *names)
    git(root, "init", "-q", "-b", "trunk")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    return root


def names(snapshot):
    with tarfile.open(fileobj=io.BytesIO(snapshot.tar)) as tar:
        return tar.getnames()


def unpacked(snapshot, root):
    """As the place has it, and what the place says of it."""
    target = root / "code" / snapshot.digest
    target.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(snapshot.tar)) as tar:
        files.extract(tar, str(target))
    return target, codetree.code_tree({"digest": snapshot.digest}, SimpleNamespace(root=str(root)))


def test_what_git_tracks_and_what_it_does_not_ignore(tmp_path):
    root = repository(tmp_path / "p", "train.py", "lib/a.py", "gone.py", "build/kept.txt", ".env.shared")
    write(root, ".gitignore", text="*.bin\nbuild/\n")
    write(root, "data/x.bin", "build/out.o", "new.py", "lib/__pycache__/a.pyc", "node_modules/m.js", "odd/pyvenv.cfg")
    write(root, "odd/lib/site.py", ".env", "lib/prod.env", ".aws/credentials")
    write(root, "train.py", text="changed")
    (root / "gone.py").unlink()
    taken = snapshot_tree(root, LARGEST)
    assert names(taken) == [".env.shared", ".gitignore", "build/kept.txt", "lib/a.py", "new.py", "train.py"]
    assert taken.left == (".aws/credentials", ".env", "lib/prod.env")
    origin = taken.origin
    assert (origin["commit"], origin["branch"], origin["dirty"]) == (git(root, "rev-parse", "HEAD"), "trunk", True)
    assert (
        "+changed" in origin["patch"]
        and "deleted file" in origin["patch"]
        and origin["untracked"] == [".gitignore", "new.py"]
    )

    git(root, "add", "-f", ".env")  # whoever tracks it means it
    assert ".env" in names(snapshot_tree(root, LARGEST))


def test_a_recorded_patch_gives_the_tracked_files_back(tmp_path):
    root = repository(tmp_path / "p", "a.txt", "b.bin")
    (root / "a.txt").write_text("other\n")
    (root / "b.bin").write_bytes(bytes(range(256)))
    patch = snapshot_tree(root, LARGEST).origin["patch"]
    git(tmp_path, "clone", "-q", str(root), "again")
    subprocess.run(["git", "apply"], cwd=tmp_path / "again", input=patch.encode(), check=True)
    assert (tmp_path / "again/b.bin").read_bytes() == bytes(range(256))
    assert (tmp_path / "again/a.txt").read_text() == "other\n"


def test_a_clean_tree_a_subfolder_and_no_commit_yet(tmp_path):
    root = repository(tmp_path / "p", "a.py", "sub/b.py")
    assert not snapshot_tree(root, LARGEST).origin["dirty"]
    write(root, ".env")  # changes nothing of what is taken
    assert not snapshot_tree(root, LARGEST).origin["dirty"]
    git(root, "checkout", "-q", "--detach")
    below = snapshot_tree(root / "sub", LARGEST)
    assert names(below) == ["b.py"] and below.origin["branch"] is None
    git(tmp_path, "init", "-q", "-b", "trunk", "fresh")
    fresh = snapshot_tree(write(tmp_path / "fresh", "a.py"), LARGEST).origin
    assert fresh["commit"] is None and fresh["dirty"] and fresh["branch"] == "trunk"


def test_submodules_and_repositories_within(tmp_path):
    inner = repository(tmp_path / "inner", "deep.py")
    root = repository(tmp_path / "p", "a.py")
    git(root, "submodule", "--quiet", "add", str(inner), "sub")
    git(root, "commit", "-q", "-m", "with it")
    write(root, "sub/.gitignore", text="*.o\n")
    write(root, "sub/more.py", "sub/x.o")
    repository(root / "clone", "c.py")
    taken = snapshot_tree(root, LARGEST)
    assert names(taken) == [".gitmodules", "a.py", "clone/c.py", "sub/.gitignore", "sub/deep.py", "sub/more.py"]
    told = {one["path"]: one for one in taken.origin["submodules"]}
    assert told["sub"]["commit"] == git(inner, "rev-parse", "HEAD") and told["sub"]["dirty"]
    assert not told["clone"]["dirty"] and taken.origin["dirty"]

    git(root, "submodule", "--quiet", "deinit", "-f", "sub")
    with pytest.raises(UsageError, match=r"submodule sub .* not checked out") as caught:
        snapshot_tree(root, LARGEST)
    assert "submodule update --init" in caught.value.hint


def test_without_git_all_but_heavy_and_secret_names(tmp_path):
    root = write(tmp_path / "p", "train.py", "lib/a.py", ".venv/x", "lib/__pycache__/a.pyc", "node_modules/m/i.js")
    write(root, "env/pyvenv.cfg", "env/bin/python", ".env", "keys/id_rsa", "keys/tls.pem", "data/d.bin")
    taken = snapshot_tree(root, LARGEST)
    assert names(taken) == ["data/d.bin", "lib/a.py", "train.py"]
    assert taken.left == (".env", "keys/id_rsa", "keys/tls.pem") and taken.origin == {"path": str(root)}
    write(repository(root / "clone", "c.py", ".gitignore"), ".gitignore", text="*.o\n")
    write(root, "clone/c.o")
    assert {"clone/c.py", "clone/.gitignore"} == {
        name for name in names(snapshot_tree(root, LARGEST)) if "clone" in name
    }


def test_a_tree_that_an_outer_repository_ignores_is_taken_as_it_lies(tmp_path):
    outer = repository(tmp_path / "p", "a.py")
    write(outer, ".gitignore", text="tools/\n")
    write(outer, "tools/t.py")
    assert names(snapshot_tree(outer / "tools", LARGEST)) == ["t.py"]


def test_git_that_cannot_be_asked_is_no_plain_folder(tmp_path, monkeypatch):
    root = repository(tmp_path / "p", "a.py")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no git on this machine"):
        snapshot_tree(root, LARGEST)
    monkeypatch.undo()
    (root / ".git/config").write_text("[broken\n")
    with pytest.raises(UsageError, match="git cannot read"):
        snapshot_tree(root, LARGEST)


def test_gits_own_variables_do_not_lead_elsewhere(tmp_path, monkeypatch):
    other = repository(tmp_path / "other", "b.py")
    root = repository(tmp_path / "p", "a.py")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert names(snapshot_tree(root, LARGEST)) == ["a.py"]


@pytest.mark.parametrize("with_git", [True, False])
def test_links_stay_links_at_the_place(tmp_path, with_git):
    root = write(tmp_path / "p", "lib/a.py")
    (root / "a.py").symlink_to("lib/a.py")
    (root / "also").symlink_to("lib")
    (root / "lib/up").symlink_to("../nothing-yet")
    if with_git:
        repository(root)
    taken = snapshot_tree(root, LARGEST)
    there, told = unpacked(taken, tmp_path / "root")
    assert os.readlink(there / "also") == "lib" and (there / "a.py").read_text() == "lib/a.py"  # noqa: PTH115
    assert told["intact"] and told["files"] == generations.tree_of(taken)
    (there / "also").unlink()
    (there / "also").symlink_to("lib/a.py")
    again = codetree.code_tree({"digest": taken.digest}, SimpleNamespace(root=str(tmp_path / "root")))
    assert not again["intact"] and generations.file_changes(told["files"], again["files"]) == ["also changed"]


def test_links_that_lead_out_are_refused_by_name(tmp_path):
    root = write(tmp_path / "p", "a.py")
    (root / "data").symlink_to("/srv/data")
    (root / "near").symlink_to("../elsewhere")
    (root / "by").symlink_to("near/../x")
    with pytest.raises(UsageError) as caught:
        snapshot_tree(root, LARGEST)
    assert all(each in caught.value.message for each in ("data → /srv/data", "near → ../elsewhere", "by → near/../x"))


def test_too_much_code_names_its_largest_files(tmp_path):
    root = write(tmp_path / "p", *(f"small{number}.py" for number in range(9)))
    (root / "weights.bin").write_bytes(bytes(300_000))
    (root / "x").mkdir()
    (root / "x/log.txt").write_bytes(bytes(250_000))
    with pytest.raises(UsageError) as caught:
        snapshot_tree(root, "500kB")
    assert "mostly weights.bin (0.3 MB), x/log.txt (0.2 MB);" in caught.value.message
    assert "0.6 MB in 11 files, more than the 500kB" in caught.value.message
    assert caught.value.hint == "the same with --set code.largest=1MB"
    assert snapshot_tree(root, "1MB").files == 11


def test_nothing_to_take_and_no_folder(tmp_path):
    (tmp_path / "p").mkdir()
    with pytest.raises(UsageError, match="holds no file"):
        snapshot_tree(tmp_path / "p", LARGEST)
    with pytest.raises(UsageError, match="there is no folder"):
        snapshot_tree(tmp_path / "q", LARGEST)


part = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=4)


@given(st.dictionaries(st.lists(part, min_size=1, max_size=2).map("/".join), st.binary(max_size=9), min_size=1))
@settings(max_examples=40, deadline=None)
def test_equal_trees_are_equal_bytes_and_the_place_knows_them(tmp_path_factory, tree):
    made = []
    for order in (sorted(tree), sorted(tree, reverse=True)):
        root = tmp_path_factory.mktemp("t")
        for name in order:
            try:
                (root / name).parent.mkdir(exist_ok=True)
                (root / name).write_bytes(tree[name])
            except OSError:
                return  # "." or a file where a folder should be
        try:
            made.append(snapshot_tree(root, LARGEST))
        except UsageError:
            return  # heavy or secret names alone
    assert made[0].tar == made[1].tar and made[0].digest == made[1].digest
    _, told = unpacked(made[0], tmp_path_factory.mktemp("root"))
    assert told["intact"] and told["files"] == generations.tree_of(made[0])


# -- in a recipe --


def recipe(tmp_path, text, name="r", overrides=()):
    write(tmp_path, f"recipes/{name}.yaml", text=f"environment: demo\ncommand: [sh, train.sh]\n{text}\n")
    return load_recipe(find_project(tmp_path), name, overrides=overrides)


def test_code_is_relative_to_the_recipes_project(tmp_path):
    assert recipe(tmp_path, "").code is None and recipe(tmp_path, "code: bundled").code is None
    assert "code: bundled\n" in dump_recipe(recipe(tmp_path, ""))
    here = recipe(tmp_path, "code: .")
    assert (here.code.path, here.code.largest) == (str(tmp_path), "64MiB")
    assert parse_recipe(dump_recipe(here)) == here
    assert recipe_digest(here, "local") != recipe_digest(recipe(tmp_path, ""), "local")
    assert recipe(tmp_path, "code: {path: ../x, largest: 1 GB}").code.path == str(tmp_path.parent / "x")
    assert recipe(tmp_path, "code: /srv/x").code.path == "/srv/x"
    more = recipe(tmp_path, "code: .", overrides=["code.largest=2GiB"])
    assert (more.code.path, more.code.largest) == (str(tmp_path), "2GiB")
    assert recipe(tmp_path, "", overrides=["code=sub"]).code.path == str(tmp_path / "sub")
    write(tmp_path, "elsewhere/r.yaml", text="environment: demo\ncommand: [x]\ncode: .\n")
    assert load_recipe(find_project(tmp_path), "elsewhere/r.yaml").code.path == str(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "code: [x]",
            '3: code must be "bundled", the path of a folder, or a mapping with path and largest, not a list',
        ),
        (
            "code:\n  largest: 1MB",
            '3: the key "path" is missing in code; add "path: ." (the path of a folder, such as .)',
        ),
        ("code:\n  path: .\n  largest: many", "5: code.largest must be a size up to 2GiB"),
        ("code:\n  path: .\n  largest: 3GiB", "5: code.largest must be a size up to 2GiB"),
        ("code:\n  pth: .", '4: unknown key "pth" in code (did you mean "path"?)'),
    ],
)
def test_wrong_code_in_a_recipe(tmp_path, monkeypatch, text, problem):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        recipe(tmp_path, text)
    (found,) = caught.value.problems
    assert found.startswith(f"recipes/r.yaml:{problem}")


def test_own_code_needs_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "recipes/r.yaml", text="environment: demo\ncode: .\n")
    with pytest.raises(ConfigError, match=r"recipes/r.yaml:2: code is a tree of your own, so a command must say"):
        load_recipe(find_project(tmp_path), "r")
