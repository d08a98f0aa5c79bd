"""Weights whose deltas delta.py measures: a decoder's matrices under Adam with drawn gradients, and a model trained on text."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from farflung.weights.elements import Bits, to_bits
from farflung.weights.streams import BF16

LAYER = {
    "self_attn.q_proj": (2, 1), "self_attn.k_proj": (1, 1), "self_attn.v_proj": (1, 1), "self_attn.o_proj": (1, 2),
    "mlp.gate_proj": (3, 1), "mlp.up_proj": (3, 1), "mlp.down_proj": (1, 3),
}  # fmt: skip
"""Shapes of a layer's matrices in its width."""
LAYER_SIZE = sum(rows * columns for rows, columns in LAYER.values())
BETAS, EPSILON = (0.9, 0.98), 1e-8
WARM_UP = 20
TEXTS = ("pydoc_data.topics", "argparse", "typing", "decimal", "doctest", "logging", "subprocess", "tarfile")


Images = dict[str, Bits]
"""Weights by name, flat, in BF16."""


class Walk:
    """One matrix under Adam, once for each learning rate. Moments depend on gradients alone, so all share them."""

    def __init__(self, shape: tuple[int, int], rates: Sequence[float], drift: float, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        weight = self._normal(shape) * (0.028 * torch.exp(0.3 * self._normal((shape[0], 1))))
        self.masters = {rate: weight.clone() for rate in rates}
        self._scale = 1e-4 * torch.exp(self._normal(shape))
        self._mean = drift * self._normal(shape)
        self._first, self._second = torch.zeros(shape), torch.zeros(shape)
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        first, second = BETAS
        gradient = self._normal(self._scale.shape).add_(self._mean).mul_(self._scale)
        self._first.lerp_(gradient, 1 - first)
        self._second.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = self._second.div(1 - second**self._steps).sqrt_().add_(EPSILON)
        update = torch.div(self._first, root, out=gradient)
        for rate, master in self.masters.items():
            master.add_(update, alpha=-rate / (1 - first**self._steps))

    def image(self, rate: float) -> Bits:
        return to_bits(self.masters[rate].bfloat16(), BF16)

    def _normal(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=self._random)


def matrices(width: int, layers: int) -> dict[str, tuple[int, int]]:
    return {
        f"model.layers.{i}.{name}.weight": (rows * width, columns * width)
        for i in range(layers)
        for name, (rows, columns) in LAYER.items()
    }


def train(
    shapes: Mapping[str, tuple[int, int]], rates: Sequence[float], drift: float, keep: set[tuple[float, int]]
) -> dict[tuple[float, int], Images]:
    """The images to keep, by learning rate and step. One matrix at a time is in memory."""
    images: dict[tuple[float, int], Images] = {key: {} for key in keep}
    for seed, (name, shape) in enumerate(shapes.items()):
        walk = Walk(shape, rates, drift, seed)
        for step in range(WARM_UP + 2):
            if step:
                walk.step()
            for rate in rates:
                if (rate, step) in keep:
                    images[rate, step][name] = walk.image(rate)
    return images


def load(folder: Path) -> PreTrainedModel:
    """The model with FP32 masters."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train_on_text(model: PreTrainedModel, folder: Path, rows: int, length: int) -> Iterator[float]:
    """Steps of AdamW (0.9, 0.999) at lr 1e-6 on sequences of English and Python; the loss after each.

    The text is documentation and sources of Python's standard library.
    """
    from transformers import AutoTokenizer

    text = "\n".join(inspect.getsource(importlib.import_module(name)) for name in TEXTS)
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text, verbose=False)["input_ids"])
    ids = ids[: len(ids) // length * length].view(-1, length)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for batch in ids.split(rows):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
