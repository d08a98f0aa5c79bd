"""Which store a URL names."""

from __future__ import annotations

from pathlib import Path

import pytest

from farflung.core.errors import BadInput
from farflung.weights import open_store


def test_a_store_is_opened_by_its_url(tmp_path: Path) -> None:
    open_store(str(tmp_path / "a b")).put("run/a", b"1")
    assert open_store(f"file://{tmp_path}/a%20b").get("run/a", 1) == b"1"
    for url in ("", "ftp://host/x", "file://host/x", "s3:///x"):
        with pytest.raises(BadInput, match="no store"):
            open_store(url)
    with pytest.raises(BadInput, match=r"file://, s3://.*gs://.*abfs://.*memory://.*https://"):
        open_store("ftp://host/x")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="not a folder"):
        open_store(str(tmp_path / "file"))
