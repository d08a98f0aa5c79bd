"""The optimiser step: groups of episodes in, new weights and what was measured out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from farflung.config import TrainConfig
from farflung.core.episode import Episode
from farflung.core.errors import BadInput, Diverged
from farflung.core.metrics import UpdateMetrics
from farflung.corrections import Guards, TokenDiagnostics, candidate_loss, make_weight, vocabulary_loss
from farflung.trainer.batch import Batch, Targets, name
from farflung.trainer.checkpoint import Checkpoint
from farflung.trainer.measure import Measurement, episode_means
from farflung.trainer.model import Policy
from farflung.trainer.packing import Pack, pack

log = logging.getLogger(__name__)

PROBES = 16
"""Tokens of a pack at which the whole vocabulary is looked at, for its entropy and for p's mass on the candidates."""


class Trainer:
    """One policy with its optimiser. ``version`` counts the updates made; version 0 is the model as it came."""

    def __init__(
        self,
        model: str | Path,
        train: TrainConfig,
        temperature: float = 1.0,
        seed: int = 0,
        *,
        device: str | None = None,
    ) -> None:
        """``model`` is a Hugging Face folder, ``device`` "cpu" or "cuda" (what there is, if not said). Raises BadInput."""
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.train = train
        self.temperature = temperature
        self.version = 0
        torch.manual_seed(seed)
        self.policy = Policy(
            model,
            device=self.device,
            compute=_compute(train.compute, self.device),
            gradient_checkpointing=train.gradient_checkpointing,
        )
        self._weight = make_weight(
            train.weight, train.band, cap=train.cap, clip_range=train.clip_range, delta=train.delta
        )
        self._guards = Guards(train.gspo, train.geometric_mask, train.opsm, train.staleness_mask)
        self._names: dict[Tensor, str] = {
            p: n for n, p in self.policy.named().items() if isinstance(p, torch.nn.Parameter)
        }
        matrices = [p for p in self._names if p.dim() >= 2]
        vectors = [p for p in self._names if p.dim() < 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": train.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=train.lr,
            betas=train.betas,
            fused=True,
        )

    def step(self, groups: Sequence[Sequence[Episode]]) -> UpdateMetrics:
        """Train on whole groups (a group may have lost members) and count one update, even if no group can teach.

        Raises BadInput or Corrupt for episodes that this policy cannot have sampled, Diverged if loss or gradient is not
        finite; nothing has changed then.
        """
        clock = _Clock()
        with clock("pack"):
            batch = Batch.of(groups, self.train, temperature=self.temperature, vocabulary=self.policy.vocabulary)
            packs = self._pack(batch)
        measurement = Measurement(batch, self.version)
        grad_norm = 0.0
        lr = self._lr()
        if packs:
            self._optimizer.zero_grad(set_to_none=True)
            try:
                for each in packs:
                    self._accumulate(batch, each, measurement, clock)
                with clock("optimizer"):
                    grad_norm = self._clip(batch)
                    for group in self._optimizer.param_groups:
                        group["lr"] = lr
                    self._optimizer.step()
            finally:
                self._optimizer.zero_grad(set_to_none=True)
        self.version += 1
        every, pools = measurement.stats()
        return UpdateMetrics(
            update=self.version,
            all=every,
            pools=pools,
            trained_groups=batch.trained_groups,
            skipped_groups=batch.skipped_groups,
            grad_norm=grad_norm,
            lr=lr,
            trained_tokens=sum(len(item.inputs) for item in batch.items),
            seconds=clock.read(),
            **episode_means(batch),
        )

    def weights(self) -> dict[str, Tensor]:
        """The masters rounded to BF16 on the CPU, by Hugging Face name, tied tensors once: what is published."""
        return {
            key: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else None, copy=True)
            for key, tensor in self.policy.named().items()
        }

    def save(self, path: Path | str, extra: Mapping[str, Any] | None = None) -> None:
        """Everything that the next step depends on, and ``extra`` (plain JSON data), as one atomic folder."""
        tensors = {f"master/{key}": tensor for key, tensor in self.policy.named().items()}
        steps: dict[str, float] = {}
        for parameter, state in self._optimizer.state.items():
            key = self._names[parameter]
            tensors |= {f"{kind}/{key}": state[kind] for kind in ("exp_avg", "exp_avg_sq")}
            steps[key] = float(state["step"])
        tensors["rng/cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        Checkpoint(tensors, {"version": self.version, "steps": steps, "extra": dict(extra or {})}).write(Path(path))

    @classmethod
    def load(
        cls,
        path: Path | str,
        model: str | Path,
        train: TrainConfig,
        temperature: float = 1.0,
        *,
        device: str | None = None,
    ) -> tuple[Trainer, dict[str, Any]]:
        """The trainer that ``save`` wrote, and its ``extra``; it goes on bit for bit. ``model`` is what it started from.

        Raises BadInput (no checkpoint, or another model's) or Corrupt.
        """
        checkpoint = Checkpoint.read(Path(path))
        trainer = cls(model, train, temperature, device=device)
        trainer._restore(checkpoint, str(path))
        return trainer, dict(checkpoint.facts["extra"])

    def export(self, path: Path | str, dtype: Literal["bfloat16", "float32"] = "bfloat16") -> None:
        """The policy as a Hugging Face folder with its tokenizer."""
        self.policy.export(Path(path), dtype)

    def _pack(self, batch: Batch) -> list[Pack]:
        if not batch.items:
            return []
        share = self.policy.packs
        budget = self.train.pack_tokens if share else 1
        return pack(
            [item.inputs for item in batch.items],
            [item.group for item in batch.items],
            budget,
            self.device,
            share=share,
        )

    def _accumulate(self, batch: Batch, pack: Pack, measurement: Measurement, clock: _Clock) -> None:
        """Forward and backward over one pack; gradients add up. Raises Diverged before the backward pass."""
        targets = Targets.of(batch, pack, self.device)
        with clock("forward"):
            loss, found = self._loss(pack, targets)
            if not math.isfinite(loss.item()):
                self._blame(batch, "loss")
        with clock("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        measurement.add(targets, found)

    def _loss(self, pack: Pack, targets: Targets) -> tuple[Tensor, TokenDiagnostics]:
        hidden = self.policy.hidden(pack).index_select(0, targets.rows)
        head, bias = self.policy.head, self.policy.bias
        how: dict[str, Any] = {
            "weight": self._weight,
            "centering": self.train.centering,
            "softcap": self.policy.softcap,
            "temperature": self.temperature,
            "denominator": targets.denominators,
            "guards": self._guards,
            "sequences": targets.sequences,
            "staleness": self.version - targets.versions,
            "in_place": True,
        }
        if targets.supports is None:
            return vocabulary_loss(hidden, head, bias, targets.sampled, targets.logprobs, targets.advantages, **how)
        return candidate_loss(
            hidden, head, bias, targets.supports, targets.sampled, targets.advantages, probes=PROBES, **how
        )

    def _clip(self, batch: Batch) -> float:
        """The gradient's norm before it is clipped. Raises Diverged."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._names, self.train.clip))
        if not math.isfinite(norm):
            self._blame(batch, "gradient")
        return norm

    def _blame(self, batch: Batch, what: str) -> None:
        """Run the episodes one by one to name the first whose loss or gradient is not finite."""
        culprit = "no episode alone, only their sum"
        for index, item in enumerate(batch.items):
            (alone,) = pack([item.inputs], [0], 1, self.device)
            own = Batch(batch.episodes, (item,), 1, 0)
            self._optimizer.zero_grad(set_to_none=True)
            loss, _ = self._loss(alone, Targets.of(own, alone, self.device))
            loss.backward()  # type: ignore[no-untyped-call]
            grads = [p.grad for p in self._names if p.grad is not None]
            if not math.isfinite(loss.item()) or not math.isfinite(float(torch.nn.utils.get_total_norm(grads))):
                culprit = name(batch.items[index].episode)
                break
        raise Diverged(
            f"the {what} is not finite: {culprit}",
            where=f"update {self.version + 1}",
            mend="go on from the last checkpoint with a smaller train.lr, or look at that episode",
        )

    def _lr(self) -> float:
        warmup = self.train.warmup
        return self.train.lr * (min(1.0, (self.version + 1) / warmup) if warmup else 1.0)

    def _restore(self, checkpoint: Checkpoint, where: str) -> None:
        tensors, steps = checkpoint.tensors, checkpoint.facts["steps"]
        masters = self.policy.named()
        saved = {key.removeprefix("master/"): t for key, t in tensors.items() if key.startswith("master/")}
        if {k: t.shape for k, t in saved.items()} != {k: t.shape for k, t in masters.items()}:
            raise BadInput("the checkpoint is of another model: names or shapes differ", where=where)
        with torch.no_grad():
            for key, tensor in masters.items():
                tensor.copy_(saved[key])
        # load_state_dict numbers parameters in the order of the groups.
        order = [self._names[p] for group in self._optimizer.param_groups for p in group["params"]]
        state = {
            number: {
                "step": torch.tensor(steps[key], dtype=torch.float32),
                "exp_avg": tensors[f"exp_avg/{key}"],
                "exp_avg_sq": tensors[f"exp_avg_sq/{key}"],
            }
            for number, key in enumerate(order)
            if key in steps
        }
        self._optimizer.load_state_dict({"state": state, "param_groups": self._optimizer.state_dict()["param_groups"]})
        torch.set_rng_state(tensors["rng/cpu"])
        if self.device.type == "cuda" and "rng/cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng/cuda"], self.device)
        self.version = int(checkpoint.facts["version"])


class _Clock:
    """Wall time by part, and in all."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._parts[part] = self._parts.get(part, 0.0) + time.perf_counter() - start

    def read(self) -> dict[str, float]:
        return {**self._parts, "total": time.perf_counter() - self._start}


def _compute(wanted: Literal["auto", "float32", "bfloat16"], device: torch.device) -> torch.dtype:
    if wanted == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32
