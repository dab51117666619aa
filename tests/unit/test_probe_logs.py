"""Reading logs by offset, their ends, and metrics."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.remote import logs, metrics

# ---- logs ------------------------------------------------------------------------------------


def test_from_an_offset_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"0123456789")
    where, data = logs.read(str(log), offset=2, limit=3)
    assert data == b"234" and (where["offset"], where["next"], where["size"]) == (2, 5, 10)
    assert logs.read(str(log), where["inode"], 10)[1] == b""
    big = tmp_path / "big"
    big.write_bytes(bytes(logs.LIMIT + 10))
    assert len(logs.read(str(big), limit=1 << 30)[1]) == logs.LIMIT


def test_rotation_and_truncation_are_said(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"0123456789")
    inode = logs.read(str(log))[0]["inode"]
    log.rename(tmp_path / "old")
    log.write_bytes(b"new content here")
    where, data = logs.read(str(log), inode, 10)
    assert where["rotated"] and not where["truncated"] and data == b"new content here"
    log.write_bytes(b"x")
    where, data = logs.read(str(log), where["inode"], 16)
    assert where["truncated"] and not where["rotated"] and data == b"x"


def test_a_missing_log(tmp_path: Path) -> None:
    where, data = logs.read(str(tmp_path / "log"), 1, 5)
    assert data == b"" and where["inode"] is None and "No such file" in where["why"]


@given(
    st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"x")), max_size=30),
    st.booleans(),
    st.integers(0, 40),
)
def test_the_last_lines(lines: list[bytes], ended: bool, wanted: int) -> None:
    content = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    with tempfile.NamedTemporaryFile() as f:
        f.write(content)
        f.flush()
        plain = content.split(b"\n")
        if plain[-1] == b"":
            plain.pop()
        kept = plain[-wanted:] if wanted else []
        expected = b"\n".join(kept) + (b"\n" if kept and content.endswith(b"\n") else b"")
        block, logs._BLOCK = logs._BLOCK, 16
        try:
            assert logs.read(f.name, tail_lines=wanted)[1] == expected
        finally:
            logs._BLOCK = block


def test_the_end_of_two_gigabytes_without_reading_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as f:
        f.truncate(2 << 30)
        f.seek(2 << 30)
        f.write(b"\n" + b"".join(b"line %d\n" % i for i in range(1000)))
    begin = time.process_time()
    _, data = logs.read(str(log), tail_lines=3)
    assert data == b"line 997\nline 998\nline 999\n"
    assert len(logs.read(str(log), tail_lines=2000)[1]) == logs.LIMIT  # one line of 2 GiB: cut, not read
    assert time.process_time() - begin < 1


# ---- metrics ---------------------------------------------------------------------------------


def write(path: Path, *lines: object, end: str = "\n") -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)
    return str(path)


def test_the_last_step_the_last_evaluation_and_the_rate(tmp_path: Path) -> None:
    steps = [{"step": n, "loss": 1.0, "tokens": 1000, "time": 100.0 + 2 * n} for n in range(5)]
    steps[0]["time"] = 0.0  # the first step took long: it was compiled
    path = write(
        tmp_path / "m", {"phase": "compiling"}, *steps[:3], {"eval": {"loss": 9}}, *steps[3:], {"eval": {"loss": 8}}
    )
    found = metrics.read(path)
    assert found["last"]["step"] == 4 and found["eval"] == {"eval": {"loss": 8}}
    assert (found["count"], found["broken"], found["why"]) == (8, 0, None)
    assert found["tokens_per_second"] == pytest.approx(4000 / 108, abs=0.1)  # too few steps to leave it out
    many = [{"step": n, "tokens": 1000, "time": 1000.0 + 2 * n} for n in range(100)]
    many[0]["time"] = 0.0
    assert metrics.read(write(tmp_path / "n", *many))["tokens_per_second"] == 500.0


def test_broken_and_strange_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m",
        '{"step": 1, "loss": NaN, "tokens": 5, "time": 1}',
        "not json",
        "[1, 2]",
        '{"step": 2, "loss": Infinity, "tokens": Infinity, "time": 2}',
        '{"step": "three"}',
        '{"step": 1e999}',
        '{"step": true}',
        "\x00\x00",
        "",
        '{"step": 3, "loss": 0.5}',
        '{"step": 4, "lo',
        end="",
    )
    found = metrics.read(path)
    assert found["last"] == {"step": 3, "loss": 0.5}
    assert found["broken"] == 3
    assert found["tokens_per_second"] is None
    assert metrics.read(str(tmp_path / "none"))["why"] == "metrics.jsonl: No such file or directory"


def test_of_a_huge_file_the_end(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with path.open("wb") as f:
        f.truncate(1 << 30)
        f.seek(1 << 30)
        for n in range(50):
            f.write(b'{"step": %d, "tokens": 10, "time": %d}\n' % (n, n))
    begin = time.process_time()
    found = metrics.read(str(path))
    assert time.process_time() - begin < 1
    assert found["last"]["step"] == 49 and found["count"] is None and found["tokens_per_second"] == 10.0


@given(st.lists(st.integers(1, 30), max_size=20))
def test_following_is_reading(pieces: list[int]) -> None:
    """However the writes fall, the follower comes to what one reading of the whole gives."""
    lines = [json.dumps({"step": n, "tokens": 7, "time": n * 0.5, "note": "ä"}, ensure_ascii=False) for n in range(8)]
    content = ("\n".join([*lines, "broken", '{"eval": 1}']) + "\n").encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m"
        follower, at = metrics.Follower(str(path)), 0
        follower.step()
        for size in [*pieces, len(content)]:
            with path.open("ab") as f:
                f.write(content[at : at + size])
            at += size
            follower.step()
        whole = metrics.read(str(path))
    summary = follower.summary
    assert (summary.last, summary.eval, summary.broken) == (whole["last"], whole["eval"], whole["broken"])
    assert summary.tokens_per_second() == whole["tokens_per_second"] == 14.0
