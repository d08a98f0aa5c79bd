"""TRL's GRPO trainer with farflung's loss, fed by a sampler that is older and coarser than the trainer.

    pip install -e ".[trl]"
    python examples/trl_grpo.py                      a quarter of a minute on one core, no download
    python examples/trl_grpo.py --weight none        without masking; --weights bf16 --refresh 1 for a faithful sampler

The sampler holds a copy of the policy in NVFP4 and takes new weights only every fourth step. It records what every token
was drawn from, ``CentredGRPOTrainer`` carries that to the loss beside TRL's own tensors, and the loss looks at exactly
those candidates. The task: each digit must follow the one before it (3 4 5 ...), from random weights.

What a trainer of your own needs of this file is ``CentredGRPOTrainer`` and the four lines of ``record``.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from farflung.core.errors import BadInput
from farflung.core.sampling import WeightFormat
from farflung.core.supports import Supports as HostSupports
from farflung.corrections import Supports, TokenDiagnostics, Weight, candidate_loss, make_weight
from farflung.formats.selection import is_quantised
from farflung.formats.weights import quantise

DIGITS = "0123456789"
LENGTH = 8
"""Tokens that are asked for in one completion."""
WATCHED = ("kl", "k3", "masked", "entropy")
"""What is logged of TokenDiagnostics."""


class CentredGRPOTrainer(GRPOTrainer):
    """GRPO with score centering and masked importance weights over the recorded candidates.

    ``rollout_func`` must return, beside TRL's own keys, ``supports``: for each completion a HostSupports with one row per
    token. TRL's ratio, clip, KL term and denominators by sequence are not used; of its settings that shape the loss only
    the temperature and ``scale_rewards`` are. One process, or several that each hold the whole LM head (DDP).
    """

    def __init__(
        self, model: Any, reward_funcs: Any, args: GRPOConfig, *rest: Any, weight: Weight, **kwargs: Any
    ) -> None:
        if args.beta:
            raise BadInput(f"beta is {args.beta}; a KL term is no part of this loss", where="GRPOConfig", mend="beta=0")
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        self.weight = weight

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        output["supports"] = [row["supports"] for row in inputs]  # TRL shuffles and splits lists as it does tensors
        return output

    def _compute_loss(self, model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
        completion, mask = inputs["completion_ids"], inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        outputs = model(
            input_ids=torch.cat([inputs["prompt_ids"], completion], 1),
            attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            output_hidden_states=True,
            logits_to_keep=1,
            use_cache=False,
        )
        lengths = torch.tensor([len(supports) for supports in inputs["supports"]], device=completion.device)
        tokens = torch.arange(completion.shape[1], device=completion.device) < lengths[:, None]
        policy = self.accelerator.unwrap_model(model)
        head = policy.get_output_embeddings()
        loss, found = candidate_loss(
            outputs.hidden_states[-1][:, -completion.shape[1] - 1 : -1][tokens],
            head.weight,
            head.bias,
            to_device(HostSupports.concat(inputs["supports"]), completion.device),
            completion[tokens],
            (inputs["advantages"][:, None] * mask)[tokens],
            weight=self.weight,
            softcap=getattr(policy.config, "final_logit_softcapping", None),
            temperature=self.temperature,
            denominator=self._denominator(inputs),
        )
        self._watch(found)
        return loss

    def _denominator(self, inputs: dict[str, Any]) -> float:
        """Action tokens of one optimiser step and process, those of zero advantage included."""
        tokens = inputs["num_items_in_batch"].item() / self.accelerator.num_processes
        if self.model.training:
            tokens *= self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return max(tokens, 1.0)

    def _watch(self, found: TokenDiagnostics) -> None:
        """Log means over the measured tokens of all processes."""
        each = [getattr(found, name)[found.measured].double() for name in WATCHED]
        sums = torch.stack([*(values.sum() for values in each), found.measured.double().sum()])
        *totals, count = self.accelerator.reduce(sums, "sum").tolist()
        if count:
            metrics = self._metrics["train" if self.model.training else "eval"]
            for name, total in zip(WATCHED, totals, strict=True):
                metrics[f"sampler/{name}"].append(total / count)


def to_device(supports: HostSupports, device: torch.device) -> Supports:
    return Supports(
        torch.from_numpy(supports.ids).to(device, torch.int64),
        torch.from_numpy(supports.logprobs).to(device),
        torch.from_numpy(supports.offsets).to(device),
    )


def record(scores: Tensor, sampled: Tensor) -> tuple[HostSupports, Tensor]:
    """What transformers' ``generate`` drew ``sampled`` [n] from: its ``scores`` [n, V] after temperature, top-k, top-p.

    Everything that was filtered out is -inf, so the finite entries are the support, and there is nothing to work out anew.
    Returns the supports and the sampled log-probabilities [n]. Raises Corrupt if a row is no distribution.
    """
    log_q = scores.float().log_softmax(-1)
    kept = log_q > -torch.inf
    offsets = np.concatenate([[0], kept.sum(-1).cumsum(0).numpy()])
    supports = HostSupports(kept.nonzero()[:, 1].to(torch.int32).numpy(), log_q[kept].numpy(), offsets)
    logprobs = log_q.gather(1, sampled[:, None]).squeeze(1)
    supports.check(sampled.to(torch.int32).numpy(), logprobs.numpy(), where="sampler")
    return supports, logprobs


class Sampler:
    """A stand-in for an inference server: the policy in a coarser weight format, refreshed every ``refresh`` steps."""

    def __init__(
        self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, weights: WeightFormat, refresh: int
    ) -> None:
        self.policy, self.tokenizer, self.weights, self.refresh = policy, tokenizer, weights, refresh
        self.model = copy.deepcopy(policy).eval()
        self.version = -1

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """TRL's ``rollout_func``: one completion for each prompt, with what each of its tokens was drawn from."""
        if (version := trainer.state.global_step // self.refresh) != self.version:
            self._load()
            self.version = version
        prompt = self.tokenizer(prompts, return_tensors="pt", padding=True)
        settings = copy.deepcopy(trainer.generation_config)
        settings.update(return_dict_in_generate=True, output_scores=True)
        made = self.model.generate(**prompt, generation_config=settings)
        rows: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "supports": []}
        scores = torch.stack(made.scores, 1)
        for ids, shown, sampled, score in zip(
            prompt.input_ids, prompt.attention_mask, made.sequences[:, prompt.input_ids.shape[1] :], scores, strict=True
        ):
            ended = (sampled == self.tokenizer.eos_token_id).nonzero()
            sampled = sampled[: int(ended[0]) + 1 if len(ended) else len(sampled)]
            supports, logprobs = record(score[: len(sampled)], sampled)
            rows["prompt_ids"].append(ids[shown.bool()].tolist())
            rows["completion_ids"].append(sampled.tolist())
            rows["logprobs"].append(logprobs.tolist())
            rows["supports"].append(supports)
        return rows

    @torch.no_grad()
    def _load(self) -> None:
        for (name, mine), theirs in zip(self.model.named_parameters(), self.policy.parameters(), strict=True):
            weight = theirs.to(torch.bfloat16)
            mine.copy_(quantise(weight, self.weights, name=name).dequantise() if is_quantised(name) else weight)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {symbol: n for n, symbol in enumerate(["<pad>", "<end>", *DIGITS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Split("", "isolated"), Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )


def make_policy(vocabulary: int, seed: int) -> PreTrainedModel:
    """A Llama of 80,000 random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def successors(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """The share of LENGTH digits that are the successor (mod 10) of the digit before them."""
    texts = [prompt[-1] + completion for prompt, completion in zip(prompts, completions, strict=True)]
    return [sum((int(b) - int(a)) % 10 == 1 for a, b in pairwise(text)) / LENGTH for text in texts]


@dataclass(frozen=True)
class Result:
    """Mean rewards of the trained policy itself, sampled from the whole vocabulary, and what TRL logged at each step."""

    before: float
    after: float
    steps: list[dict[str, float]] = field(default_factory=list)


@torch.no_grad()
def evaluate(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, copies: int = 32) -> float:
    prompts = [digit for digit in DIGITS for _ in range(copies)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    made = policy.eval().generate(**inputs, do_sample=True, top_k=0, max_new_tokens=LENGTH)
    texts = tokenizer.batch_decode(made[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return float(np.mean(successors(prompts, texts)))


def make_trainer(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    sampler: Sampler,
    weight: Weight,
    steps: int,
    folder: str,
) -> CentredGRPOTrainer:
    config = GRPOConfig(
        output_dir=folder, max_steps=steps, learning_rate=1e-3, lr_scheduler_type="constant",
        per_device_train_batch_size=32, gradient_accumulation_steps=2, num_generations=8, scale_rewards="none",
        max_completion_length=LENGTH, temperature=1.0, top_p=0.95, top_k=10,
        use_cpu=True, bf16=False, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    prompts = [*DIGITS, *(DIGITS[n : n + 3] for n in range(8))]
    trainer = CentredGRPOTrainer(
        policy,
        successors,
        config,
        Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        rollout_func=sampler,
        weight=weight,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(
    *, steps: int = 100, weight: str = "mis", weights: WeightFormat = "nvfp4", refresh: int = 4, seed: int = 0
) -> Result:
    """Train the toy policy for ``steps`` updates."""
    tokenizer = make_tokenizer()
    policy = make_policy(len(tokenizer), seed)
    before = evaluate(policy, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        sampler = Sampler(policy, tokenizer, weights, refresh)
        trainer = make_trainer(policy, tokenizer, sampler, make_weight(weight), steps, folder)
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    return Result(before, evaluate(policy, tokenizer), log)


def mean(steps: Sequence[dict[str, float]], key: str) -> float:
    """Over the steps that measured it: one whose groups were all of equal rewards computes nothing."""
    values = [step[key] for step in steps if key in step]
    return sum(values) / len(values) if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description="TRL's GRPO trainer with farflung's loss, on a toy task.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--weight", choices=["none", "mis"], default="mis")
    parser.add_argument("--weights", choices=["bf16", "fp8", "mxfp4", "nvfp4"], default="nvfp4")
    parser.add_argument("--refresh", type=int, default=4, help="steps between two refreshes of the sampler")
    parser.add_argument("--seed", type=int, default=0)
    result = train(**vars(parser.parse_args()))
    print("steps    reward  KL(q||p)      k3  masked  entropy")
    for n in range(0, len(result.steps), 10):
        some = result.steps[n : n + 10]
        reward, *found = (mean(some, key) for key in ("reward", *(f"sampler/{name}" for name in WATCHED)))
        print("{:3} {:3}  {:7.3f}  {:8.4f}  {:6.4f}  {:6.2%}  {:7.3f}".format(n + 1, n + len(some), reward, *found))
    print(f"mean reward of the policy itself: {result.before:.3f} before, {result.after:.3f} after")


if __name__ == "__main__":
    main()
