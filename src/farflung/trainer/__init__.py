"""The trainer: a Hugging Face causal LM, packed sequences, the corrected update, checkpoints."""

from farflung.trainer.step import Diverged, Trainer

__all__ = ["Diverged", "Trainer"]
