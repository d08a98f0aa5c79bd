"""Weight versions: the trainer publishes exact deltas for every format, samplers stage, verify and apply them, any store lies between."""

from farflung.weights.compactor import Compactor
from farflung.weights.folder import FolderStore
from farflung.weights.manifest import derive_key
from farflung.weights.publisher import Published, Publisher
from farflung.weights.ranks import TorchRanks
from farflung.weights.store import Conflict, Missing, Store, StoreError
from farflung.weights.streams import Shard
from farflung.weights.subscriber import Subscriber, Update
from farflung.weights.urls import open_store

__all__ = [
    "Compactor",
    "Conflict",
    "FolderStore",
    "Missing",
    "Published",
    "Publisher",
    "Shard",
    "Store",
    "StoreError",
    "Subscriber",
    "TorchRanks",
    "Update",
    "derive_key",
    "open_store",
]
