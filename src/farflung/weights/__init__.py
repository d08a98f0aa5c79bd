"""Weight versions: the trainer publishes exact BF16 deltas, samplers fetch and verify them, any store lies between."""

from farflung.weights.publisher import Published, Publisher
from farflung.weights.store import Conflict, FolderStore, Missing, Store, StoreError, open_store
from farflung.weights.subscriber import Subscriber

__all__ = [
    "Conflict",
    "FolderStore",
    "Missing",
    "Published",
    "Publisher",
    "Store",
    "StoreError",
    "Subscriber",
    "open_store",
]
