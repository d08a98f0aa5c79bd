"""Frames give back what was put in, and nothing that is not a frame gets past decode."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from farflung.core import frame
from farflung.core.errors import Corrupt

dtypes = st.sampled_from(sorted(frame.DTYPES)).map(np.dtype)
arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)
plain: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    data=st.dictionaries(st.text(), plain, max_size=4), named=st.dictionaries(st.text(max_size=8), arrays, max_size=4)
)
def test_what_goes_in_comes_out(data: dict[str, Any], named: dict[str, np.ndarray]) -> None:
    got, found = frame.decode(frame.encode(data, named))
    assert got == data
    assert list(found) == list(named)
    for name, array in named.items():
        assert found[name].dtype == array.dtype.newbyteorder("<")
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


@given(named=st.dictionaries(st.text(max_size=4), arrays, min_size=1, max_size=3), data=st.data())
def test_a_cut_frame_is_refused(named: dict[str, np.ndarray], data: st.DataObject) -> None:
    raw = frame.encode({"a": 1}, named)
    with pytest.raises(Corrupt):
        frame.decode(raw[: data.draw(st.integers(0, len(raw) - 1))])


@given(
    named=st.dictionaries(st.text(max_size=4), arrays, max_size=3),
    at=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_never_breaks_the_decoder(named: dict[str, np.ndarray], at: float, bit: int) -> None:
    raw = bytearray(frame.encode({"a": 1}, named))
    raw[int(at * len(raw))] ^= 1 << bit
    with contextlib.suppress(Corrupt):
        frame.decode(bytes(raw))


@given(raw=st.binary(max_size=200) | st.binary(max_size=200).map(lambda b: b"FFR1" + b))
def test_arbitrary_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(Corrupt):
        frame.decode(raw)


def crafted(header: Any, tail: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"FFR1" + len(text).to_bytes(4, "little") + text + tail


@pytest.mark.parametrize(
    "header",
    [
        {"data": {}, "arrays": [["x", "float32", [1 << 40, 1 << 40]]]},
        {"data": {}, "arrays": [["x", "float32", [-1]]]},
        {"data": {}, "arrays": [["x", "float32", [0, 1 << 70]]]},
        {"data": {}, "arrays": [["x", "uint8", [0] * 100]]},
        {"data": {}, "arrays": [["x", "uint8", [3] * 1_000_000]]},
        {"data": {}, "arrays": [["x", "object", [1]]]},
        {"data": {}, "arrays": [["x", "float32"]]},
        {"data": [], "arrays": []},
        {"arrays": []},
        [],
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_hostile_header_costs_an_error_and_no_memory(header: Any) -> None:
    with pytest.raises(Corrupt):
        frame.decode(crafted(header))


def test_a_header_longer_than_the_frame_is_refused() -> None:
    with pytest.raises(Corrupt, match="claims"):
        frame.decode(b"FFR1" + (1 << 31).to_bytes(4, "little") + b"{}")


def test_bytes_after_the_last_array_are_refused() -> None:
    with pytest.raises(Corrupt, match="follow"):
        frame.decode(frame.encode({}) + b"\0" * 8)


def test_arrays_that_a_frame_cannot_carry_are_refused() -> None:
    with pytest.raises(TypeError, match="complex128"):
        frame.encode({}, {"x": np.zeros(1, np.complex128)})


def test_big_endian_and_strided_arrays_are_carried_by_value() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    _, found = frame.decode(frame.encode({}, {"x": array}))
    np.testing.assert_array_equal(found["x"], array)


def test_decoded_arrays_cannot_be_written() -> None:
    _, found = frame.decode(frame.encode({}, {"x": np.zeros(3, np.float32)}))
    with pytest.raises(ValueError):
        found["x"][0] = 1
