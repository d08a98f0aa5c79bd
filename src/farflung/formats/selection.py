"""Which tensors of a model take the pool's weight format."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Selection:
    """The linear projections of attention and the MLP, but for tensors whose Hugging Face name matches one of ``exclude``.

    exclude: glob patterns such as "model.layers.0.*"; case matters. What is not taken stays BF16.
    """

    exclude: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        return is_quantised(name) and not any(fnmatchcase(name, pattern) for pattern in self.exclude)


def is_quantised(name: str) -> bool:
    """True for the weights (not biases) of attention's and the MLP's linear projections, by their Hugging Face name.

    Embeddings, LM head and norms stay BF16, as engines leave them: they are few, and the LM head decides the logits.
    """
    parts = name.split(".")
    return len(parts) >= 3 and parts[-1] == "weight" and parts[-2] in PROJECTIONS
