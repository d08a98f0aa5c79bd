"""farflung: reinforcement learning of LLM agents on whatever accelerators you can get."""

__version__ = "0.1.0"
