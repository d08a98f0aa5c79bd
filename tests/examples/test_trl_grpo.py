"""TRL's trainer with the centred loss: the gradient is the definition's, and the toy policy learns."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.core.errors import BadInput, Corrupt
from farflung.corrections import make_weight

pytest.importorskip("trl", reason='TRL is not installed: pip install -e ".[trl]"')

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # TRL and transformers warn of each other's ways
]


@pytest.fixture(scope="module")
def example(load_example: Callable[[str], ModuleType]) -> ModuleType:
    return load_example("trl_grpo")


@pytest.fixture
def trainer(example: ModuleType, tmp_path: Path) -> Any:
    tokenizer = example.make_tokenizer()
    policy = example.make_policy(len(tokenizer), seed=0)
    sampler = example.Sampler(policy, tokenizer, "mxfp4", refresh=1)
    return example.make_trainer(policy, tokenizer, sampler, make_weight("mis", (0.98, 1.02)), 1, str(tmp_path))


def definition(trainer: Any, inputs: dict[str, Any]) -> Tensor:
    """The sum over tokens from full logits, token by token, by automatic differentiation."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, inputs["prompt_ids"].shape[1] - 1 :]
    loss = torch.zeros(())
    for n, supports in enumerate(inputs["supports"]):
        for t in range(len(supports)):
            row = supports.rows(t, t + 1)
            names, log_q = torch.from_numpy(row.ids).long(), torch.from_numpy(row.logprobs)
            log_p = torch.log_softmax(logits[n, t, names] / trainer.temperature, -1)
            ratio = (log_p - log_q).exp().detach()
            weight = torch.where((ratio >= 0.98) & (ratio <= 1.02), ratio, torch.zeros(()))
            own = names == inputs["completion_ids"][n, t]
            loss -= inputs["advantages"][n] * ((weight * log_p)[own].sum() - (log_q.exp() * weight * log_p).sum())
    return loss


def test_the_gradient_of_a_step_is_that_of_the_definition_over_what_was_recorded(trainer: Any) -> None:
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps  # as `train` sets it
    batch = next(iter(trainer.get_train_dataloader()))
    parts = []
    for step in range(trainer.args.gradient_accumulation_steps):
        trainer._step = step
        parts.append(trainer._prepare_inputs(batch))
    assert len({len(supports) for part in parts for supports in part["supports"]}) > 1
    assert parts[0]["prompt_mask"].min() == 0
    for part in parts:
        trainer._compute_loss(trainer.model, part).backward()
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    assert 0.05 < trainer._metrics["train"]["sampler/masked"][0] < 0.95
    trainer.model.zero_grad()
    tokens = sum(len(supports) for part in parts for supports in part["supports"])
    (sum(definition(trainer, part) for part in parts) / tokens).backward()
    for name, parameter in trainer.model.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=1e-3, atol=1e-6), name
        assert parameter.grad.abs().max() > 0


def test_the_policy_learns_and_a_faithful_sampler_agrees_with_it(example: ModuleType) -> None:
    result = example.train(steps=40, weights="bf16", refresh=1)
    assert result.after > result.before + 0.2
    assert max(step["sampler/kl"] for step in result.steps if "sampler/kl" in step) < 1e-3


def test_a_coarse_and_late_sampler_shows_in_the_diagnostics(example: ModuleType) -> None:
    result = example.train(steps=16, weights="nvfp4", refresh=8)
    assert all(math.isfinite(value) for step in result.steps for key, value in step.items() if "sampler/" in key)
    assert example.mean(result.steps, "sampler/kl") > 1e-3
    assert result.steps[7]["sampler/kl"] > result.steps[0]["sampler/kl"]


def test_scores_that_do_not_hold_the_sampled_token_are_refused(example: ModuleType) -> None:
    scores = torch.tensor([[0.0, 1.0, -math.inf], [0.0, -math.inf, -math.inf]])
    supports, logprobs = example.record(scores, torch.tensor([1, 0]))
    assert supports.sizes.tolist() == [2, 1]
    assert torch.allclose(logprobs, torch.tensor([1.0 - math.log1p(math.e), 0.0]))
    with pytest.raises(Corrupt, match="row 1's sampled token 2"):
        example.record(scores, torch.tensor([1, 2]))


def test_a_term_that_the_loss_has_not_is_refused(example: ModuleType, tmp_path: Path) -> None:
    tokenizer = example.make_tokenizer()
    with pytest.raises(BadInput, match=r"beta is 0\.1"):
        example.CentredGRPOTrainer(
            example.make_policy(len(tokenizer), seed=0),
            example.successors,
            example.GRPOConfig(output_dir=str(tmp_path), beta=0.1, use_cpu=True, bf16=False, report_to="none"),
            example.Dataset.from_dict({"prompt": ["1"]}),
            processing_class=tokenizer,
            rollout_func=lambda prompts, trainer: {},
            weight=make_weight("mis"),
        )
