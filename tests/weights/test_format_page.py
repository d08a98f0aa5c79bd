"""docs/weights.md describes the bytes: a reader written after that page alone finds what was published."""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from farflung.weights import FolderStore, Publisher, Subscriber
from farflung.weights.elements import to_bits
from tests.weights.published import KEY, RUN, TOKEN, policy, step

BITS = {"F32": 32, "BF16": 16, "F16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "U8": 8, "F4": 4}


def read_frame(raw: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    assert raw[:4] == b"FFR1"
    at = 8 + int.from_bytes(raw[4:8], "little")
    header = json.loads(raw[8:at])
    assert at % 8 == 0
    arrays = {}
    for name, dtype, (length,) in header["arrays"]:
        assert dtype == "uint8"
        arrays[name] = raw[at : at + length] if name == "hashes" else zstandard.decompress(raw[at : at + length])
        at += length + -length % 8
    assert at == len(raw)
    return header["data"], arrays


class Reader:
    """Elements of every tensor as a flat array of Python's own integers, one for each element."""

    def __init__(self, root: Path, format: str) -> None:
        self.run, self.format = root / RUN, format
        self.elements: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
        self.forms: set[int] = set()
        self.planes: set[str] = set()

    def stream(self, name: str) -> dict[str, Any]:
        raw = (self.run / "manifests" / name).read_bytes()
        assert hashlib.sha256(raw).hexdigest() == name.split("-")[1]
        body, signature = raw.split(b"\n")
        assert hmac.new(KEY, b"farflung weights\n" + body, "sha256").hexdigest().encode() == signature
        found: dict[str, Any] = json.loads(body)["streams"][self.format]
        return found

    def object(self, part: list[Any]) -> bytes:
        raw = (self.run / "objects" / part[0]).read_bytes()
        assert [hashlib.sha256(raw).hexdigest(), len(raw)] == part[:2]
        return raw

    def take(self, stream: dict[str, Any], parts: str) -> None:
        raw = self.object(stream["schema"])
        schema = json.loads(raw)
        names = list(schema["tensors"])
        for name, (kind, shape) in schema["tensors"].items():
            self.elements.setdefault(name, np.zeros(int(np.prod(shape)) * (2 if kind == "F4" else 1), np.int64))
        for part in stream[parts]:
            self.apply(self.object(part), schema, names)
        hashes = [self.hash(names[n], start, size, schema) for n, start, size in schema["pieces"]]
        root = hashlib.sha256(hashlib.sha256(raw).digest() + b"".join(hashes)).hexdigest()
        assert root == stream["root"]

    def hash(self, name: str, start: int, size: int, schema: dict[str, Any]) -> bytes:
        return xxhash.xxh3_128_digest(self.packed(name, schema)[start * BITS[schema["tensors"][name][0]] // 8 :][
            : size * BITS[schema["tensors"][name][0]] // 8
        ])  # fmt: skip

    def packed(self, name: str, schema: dict[str, Any]) -> bytes:
        bits, values = BITS[schema["tensors"][name][0]], self.elements[name]
        if bits == 4:
            return (values[::2] | values[1::2] << 4).astype(np.uint8).tobytes()
        return values.astype(f"<u{bits // 8}").tobytes()

    def apply(self, raw: bytes, schema: dict[str, Any], names: list[str]) -> None:
        data, arrays = read_frame(raw)
        self.planes |= set(arrays)
        n, at = data["pieces"], dict.fromkeys(arrays, 0)

        def take(plane: str, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
            if not count:
                return np.zeros(0, np.int64)
            part = np.frombuffer(arrays[plane], np.uint8)[at[plane] : at[plane] + count].astype(np.int64)
            assert len(part) == count
            at[plane] += count
            return part

        def escapes(plane: str, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
            planes = [f"{plane}{i}" for i in range(4) if f"{plane}{i}" in arrays]
            return sum((take(p, count) << 8 * i for i, p in enumerate(planes)), np.zeros(count, np.int64))

        table = arrays["table"]
        numbers = np.cumsum(np.frombuffer(table[: 4 * n], "<u4").astype(np.int64) + 1) - 1
        self.forms |= set(table[4 * n : 5 * n])
        forms, counts = table[4 * n : 5 * n], np.frombuffer(table[5 * n :], "<u4")
        for i in range(n):
            number, start, size = schema["pieces"][numbers[i]]
            kind = schema["tensors"][names[number]][0]
            bits, target = BITS[kind], self.elements[names[number]][start : start + size]
            if forms[i] == 0:
                count = int(counts[i])
                k = max(0, int(np.log2(size // count)) - 1)
                k -= k % 8 if k % 8 in (1, 2) else 0
                control = take("control", count)
                gap = np.zeros(count, np.int64)
                for plane in range((k + 7) // 8):
                    gap |= take(f"low{plane}", count) << 8 * plane
                top, code = control >> 4, control & 15
                top[top == 15] += escapes("gap", int((top == 15).sum()))
                code[code == 15] += escapes("step", int((code == 15).sum()))
                positions = np.cumsum((top << k | gap) + 1) - 1
                signed = np.where(code % 2 == 0, -(code // 2) - 1, code // 2 + 1)
                target[positions] = (target[positions] + signed) % (1 << bits)
            else:
                width = max(8, bits) // 8
                items = size * bits // (8 * width)
                name = ("dense", "whole")[forms[i] - 1] + str(width)
                values = sum(take(f"{name}.{b}", items) << 8 * b for b in range(width))
                if forms[i] == 1:
                    values = np.where(values % 2 == 0, values // 2, -(values // 2) - 1) % (1 << 8 * width)
                if bits == 4:
                    values = np.stack([values & 15, values >> 4], 1).reshape(-1)
                target[:] = values if forms[i] == 2 else (target + values) % (1 << bits)
            assert self.hash(names[number], start, size, schema) == arrays["hashes"][16 * i : 16 * i + 16]
        assert all(at[name] == len(plane) for name, plane in arrays.items() if name not in ("table", "hashes"))


def publish_all_forms(store: FolderStore, formats: tuple[str, ...]) -> int:
    """Steps of many sizes: small ones, one that changes most elements, and some that move far. The last version."""
    weights = policy()
    publisher = Publisher(store, RUN, formats=formats, anchor_every=4, key=KEY)
    publisher.publish(0, weights)
    for version, size in enumerate((2e-5, 2e-2, 2e-5, 0.0), start=1):
        step(weights, version, size)
        for name, tensor in weights.items():
            if name != "lm_head.weight":
                tensor.view(-1)[:40] *= -1.5
                tensor.view(-1)[-1] *= -1.5  # after a gap that is far above the mean
        publisher.publish(version, weights)
    return 4


@pytest.mark.parametrize("format", ["bf16", "fp8", "mxfp4", "nvfp4"])
def test_a_reader_written_after_the_page_finds_the_published_weights(tmp_path: Path, format: str) -> None:
    store = FolderStore(tmp_path)
    last = publish_all_forms(store, (format,))
    pointer = json.loads((tmp_path / RUN / "latest").read_text())
    manifests = {path.name[:8]: path.name for path in (tmp_path / RUN / "manifests").iterdir()}
    assert manifests[f"{pointer['version']:08d}"].endswith(pointer["manifest"])
    reader = Reader(tmp_path, format)
    reader.take(reader.stream(manifests["00000000"]), "anchor")
    for version in range(1, last + 1):
        reader.take(reader.stream(manifests[f"{version:08d}"]), "delta")
    assert reader.forms == {0, 1, 2}
    assert reader.planes >= {"control", "low0", "gap0", "step0"}
    again = Reader(tmp_path, format)
    again.take(again.stream(manifests[f"{last:08d}"]), "anchor")
    assert all(np.array_equal(again.elements[name], values) for name, values in reader.elements.items())
    subscriber = Subscriber(store, RUN, format=format, key=KEY)
    tensors = subscriber.fetch(last).tensors
    assert subscriber.image is not None
    schema = json.loads(subscriber.image.schema.encode())
    for name in reader.elements:
        kind = subscriber.image.schema.tensors[name].kind
        assert reader.packed(name, schema) == to_bits(tensors[name], kind).tobytes()


def test_the_signing_key_is_what_the_page_says() -> None:
    assert hmac.new(TOKEN.encode(), b"farflung weights", "sha256").digest() == KEY
