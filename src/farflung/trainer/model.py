"""The policy: any Hugging Face causal LM, in float32 masters, run without its LM head over packed sequences."""

from __future__ import annotations

import copy
import logging
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from farflung.core.errors import BadInput
from farflung.trainer.attention import NAME, packed_attention
from farflung.trainer.files import new_folder, save_tensors
from farflung.trainer.packing import Pack, pack

log = logging.getLogger(__name__)

SIDE_FILES = (
    "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "generation_config.json", "spiece.model", "sentencepiece*",
)  # fmt: skip
"""What an export copies beside weights and configuration."""

transformers.AttentionInterface.register(NAME, packed_attention)


class Policy:
    """``hidden`` gives last hidden states of a pack; ``head``, ``bias`` and ``softcap`` are the LM head that losses read."""

    def __init__(
        self, folder: str | Path, *, device: torch.device, compute: torch.dtype, gradient_checkpointing: bool = False
    ) -> None:
        self.folder = Path(folder)
        _check_folder(self.folder)
        self.device = device
        self.compute = compute
        self.config, self.model = _load(self.folder)
        self.model.to(device).train()
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.decoder: nn.Module = self.model.get_decoder()
        output = self.model.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise BadInput(f"{type(self.model).__name__} has no linear LM head", where=str(self.folder))
        self.head: Tensor = output.weight
        self.bias: Tensor | None = output.bias
        self.softcap: float | None = getattr(self.config.get_text_config(), "final_logit_softcapping", None)
        self.packs = self._check()

    @property
    def vocabulary(self) -> int:
        return self.head.shape[0]

    def hidden(self, pack: Pack) -> Tensor:
        """[rows, d] in the compute type, with gradients."""
        extra = {"layout": pack.layout} if self.packs else {}
        with self._autocast():
            out = self.decoder(input_ids=pack.ids[None], position_ids=pack.positions[None], use_cache=False, **extra)
        states: Tensor = out.last_hidden_state[0]
        return states

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.compute, enabled=self.compute != torch.float32)

    def _close(self, a: Tensor, b: Tensor) -> bool:
        """Equal but for the rounding of another order of sums (on a GPU, float32 products may use TF32)."""
        exact = self.device.type == "cpu" and self.compute == torch.float32
        scale = b.abs().max().clamp(min=1e-6)
        return bool((a - b).abs().max() <= (1e-4 if exact else 5e-2) * scale)

    def named(self) -> dict[str, Tensor]:
        """Every master and persistent buffer under its Hugging Face name, tied ones once (under the first name)."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor
        return found

    def export(self, path: Path, dtype: Literal["bfloat16", "float32"]) -> None:
        """A folder that transformers loads: configuration, one safetensors file, tokenizer files as they came."""
        kind = getattr(torch, dtype)
        tensors = {
            name: tensor.detach().to("cpu", kind if tensor.is_floating_point() else None).contiguous()
            for name, tensor in self.named().items()
        }
        config = copy.deepcopy(self.config)
        config.dtype = dtype
        with new_folder(path) as folder:
            config.save_pretrained(folder)
            save_tensors(tensors, folder / "model.safetensors")
            for pattern in SIDE_FILES:
                for file in self.folder.glob(pattern):
                    if file.is_file():
                        shutil.copyfile(file, folder / file.name)

    @torch.no_grad()
    def _check(self) -> bool:
        """Whether packing gives what single passes give. Raises BadInput if the logits are not the LM head's product.

        Three short sequences, two with a common beginning, go through the model as it comes and then as one pack: models
        that mix tokens other than by attention, or whose attention has terms of its own, are found out here.
        """
        rng = np.random.default_rng(0)
        ids = rng.integers(0, self.vocabulary, 44).astype(np.int32)
        sequences = [ids[:20], np.concatenate([ids[:17], ids[20:26]]), ids[26:44]]
        alone = []
        for sequence in sequences:
            tokens = torch.from_numpy(sequence).to(self.device, torch.int64)[None]
            with self._autocast():
                out = self.model(input_ids=tokens, use_cache=False)
                alone.append(self.decoder(input_ids=tokens, use_cache=False).last_hidden_state[0])
                product = nn.functional.linear(alone[-1], self.head, self.bias)
            if self.softcap is not None:
                product = self.softcap * torch.tanh(product / self.softcap)
            if not self._close(product, out.logits[0]):
                raise BadInput(
                    f"the logits of {type(self.model).__name__} are more than its LM head's product",
                    where=str(self.folder),
                    mend="models with scaled logits cannot be trained yet",
                )
        (one,) = pack(sequences, [0, 0, 0], 1 << 20, self.device)
        before = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation(NAME)
            self.packs = True
            states = self.hidden(one)
            if all(self._close(states[one.paths[i]], alone[i]) for i in range(len(sequences))):
                return True
        except (TypeError, ValueError, RuntimeError) as error:
            log.info("packed attention does not fit %s: %s", type(self.model).__name__, error)
        self.model.set_attn_implementation(before)
        log.warning("%s cannot be packed; every sequence gets a pass of its own", type(self.model).__name__)
        return False


def _check_folder(folder: Path) -> None:
    """Raises BadInput unless it could be a model."""
    if not folder.is_dir():
        raise BadInput("no such model folder", where=str(folder))
    if not (folder / "config.json").is_file():
        raise BadInput("no config.json: not a Hugging Face model folder", where=str(folder))
    if not any(folder.glob("*.safetensors")):
        raise BadInput("no weights (*.safetensors) beside its config.json", where=str(folder))


def _load(folder: Path) -> tuple[Any, Any]:
    """(configuration as it came, model in float32 without dropout). Raises BadInput."""
    where = str(folder)
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        original = copy.deepcopy(config)
        for name, value in vars(config).items():
            if isinstance(value, float) and (name.endswith(("dropout", "dropout_prob", "_pdrop")) or name == "dropout"):
                setattr(config, name, 0.0)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except ValueError as error:
        first = str(error).strip().splitlines()[0]
        raise BadInput(f"not a causal LM that transformers loads: {first}", where=where) from None
    except Exception as error:  # torn safetensors, unreadable files, bad JSON: each library has its own type
        raise BadInput(f"the model cannot be loaded: {error}", where=where) from None
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    wrong = sorted({*info["missing_keys"], *(str(entry[0]) for entry in info["mismatched_keys"])})
    if wrong:
        raise BadInput(f"{len(wrong)} tensors are missing or have another shape, e.g. {wrong[0]}", where=where)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return original, model
