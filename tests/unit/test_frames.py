"""Frames: what goes in comes out, in whatever pieces it travels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.remote import frames

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
HEADER = st.dictionaries(TEXT, st.one_of(st.none(), st.booleans(), st.integers(), TEXT, st.lists(TEXT)), max_size=4)


@given(st.lists(st.tuples(HEADER, st.binary(max_size=50)), max_size=5), st.integers(1, 30))
def test_any_pieces_give_the_same_frames(sent, size):
    stream = b"".join(frames.encode(header, payload) for header, payload in sent)
    decoder = frames.Decoder()
    received = [frame for piece in frames.split(stream, size) for frame in decoder.feed(piece)]
    assert received == sent
    assert decoder.pending == 0


def test_a_cut_frame_stays_pending():
    decoder = frames.Decoder()
    assert decoder.feed(frames.encode({"id": 1}, b"abc")[:-1]) == []
    assert decoder.pending > 0


@pytest.mark.parametrize(
    "noise", [b"Welcome to this machine!", b"\0\0\0\2\0\0\0\0[]", b"\0\0\0\1\0\0\0\0{", b"\xff" * 8]
)
def test_noise_is_no_frame(noise):
    with pytest.raises(frames.FrameError):
        frames.Decoder().feed(noise)


def test_a_message_that_is_too_large_is_not_sent(monkeypatch):
    monkeypatch.setattr(frames, "MAX_PAYLOAD", 10)
    with pytest.raises(frames.FrameError, match="too large"):
        frames.encode({}, b"x" * 11)


def test_an_error_has_a_known_code():
    assert frames.OpError("refused", "no").message == "no"
    with pytest.raises(ValueError):
        frames.OpError("other", "no")
