"""The store that a URL names."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from farflung.core.errors import BadInput
from farflung.weights.folder import FolderStore
from farflung.weights.store import Store

_OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "memory")
_MIRROR_SCHEMES = ("http", "https")


def open_store(url: str, *, token: str | None = None) -> Store:
    """The store at ``url``; objects.py says which variables of the environment an object store reads.

    ``/path``, ``file:///path``          a folder
    ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix`` (``abfs://`` ...)    an object store
    ``memory://name``                    a store in this process, the same one for everybody who names it
    ``http://host/prefix``, ``https://`` a mirror, to read from; ``token`` is sent to it and to no other kind

    Raises BadInput for what is no such URL.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FolderStore(unquote(parts.path))
    if parts.scheme == "" and url:
        return FolderStore(url)
    if parts.scheme in _OBJECT_SCHEMES:
        from farflung.weights.objects import ObjectStore

        return ObjectStore(url)
    if parts.scheme in _MIRROR_SCHEMES:
        from farflung.weights.objects import MirrorStore

        return MirrorStore(url, token=token)
    known = ", ".join(f"{scheme}://" for scheme in ("file", *_OBJECT_SCHEMES, *_MIRROR_SCHEMES))
    raise BadInput(f"no store can be opened at {url!r}", mend=f"give a folder's path or a URL with one of {known}")
