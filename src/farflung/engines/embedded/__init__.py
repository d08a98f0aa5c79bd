"""The embedded engine: a plain, fast decoder in torch for Llama and Qwen3 folders in Hugging Face format."""

from farflung.engines.embedded.engine import EmbeddedEngine, EngineOptions

__all__ = ["EmbeddedEngine", "EngineOptions"]
