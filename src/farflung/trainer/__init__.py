"""The trainer: a Hugging Face causal LM, packed sequences, the corrected update, checkpoints."""

from farflung.core.errors import Diverged
from farflung.trainer.step import Trainer

__all__ = ["Diverged", "Trainer"]
