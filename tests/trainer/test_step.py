"""One optimiser step: its gradient, what it measures, what it refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from farflung.config import TrainConfig
from farflung.core.episode import EndReason, Episode
from farflung.core.errors import BadInput, Corrupt
from farflung.core.metrics import UpdateMetrics
from farflung.corrections import Masked, Supports, candidate_loss
from farflung.corrections.head import weight_gradient
from farflung.trainer import Diverged, Trainer
from tests.trainer.episodes import BF16, FP4, episode, load, random_group, trajectory

Folder = Callable[[str], Path]
SGD_LIKE = TrainConfig(lr=1e-3, clip=1e9)


def masters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.policy.named().items()}


def expected_gradient(folder: Path, groups: list[list[Episode]]) -> tuple[dict[str, torch.Tensor], float]:
    """The same loss from whole, separate, unpacked forward passes of a fresh model."""
    model = load(folder)
    total = sum(len(e.trajectory.logprobs) for group in groups for e in group)
    for group in groups:
        mean = sum(e.reward for e in group) / len(group)
        for e in group:
            t = e.trajectory
            assert t.supports is not None
            hidden = model.model(input_ids=torch.from_numpy(t.ids).long()[None]).last_hidden_state[0]
            at = np.flatnonzero(t.action)
            supports = Supports(*(torch.from_numpy(a) for a in (t.supports.ids.astype(np.int64), t.supports.logprobs, t.supports.offsets)))  # fmt: skip
            loss, _ = candidate_loss(
                hidden[at - 1], model.lm_head.weight, None, supports, torch.from_numpy(t.ids[at]).long(),
                torch.full((len(at),), e.reward - mean), weight=Masked(0.5, 5.0),
                softcap=getattr(model.config, "final_logit_softcapping", None), denominator=total,
            )  # fmt: skip
            loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    norm = float(torch.sqrt(sum((g**2).sum() for g in grads.values())))
    return grads, norm


@pytest.mark.parametrize("kind", ["llama", "llama-untied", "qwen3", "gemma2", "gemma2-capped"])
@pytest.mark.parametrize("pack_tokens", [1, 60, 4096])
def test_the_gradient_is_that_of_separate_passes(
    kind: str, pack_tokens: int, model_folder: Folder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(kind)
    model = load(folder)
    groups = [random_group(model, rng, group=g, noise=0.6) for g in range(2)]
    groups.append(random_group(model, rng, group=2, rewards=[1, 1, 1, 1]))
    want, norm = expected_gradient(folder, groups)
    trainer = Trainer(folder, TrainConfig(pack_tokens=pack_tokens, clip=1e9))
    seen: dict[str, torch.Tensor] = {}

    def keep() -> None:
        seen.update({n: p.grad.clone() for n, p in trainer.policy.model.named_parameters() if p.grad is not None})

    monkeypatch.setattr(trainer._optimizer, "step", keep)
    metrics = trainer.step(groups)
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-4)
    assert seen.keys() == want.keys()
    for name, grad in want.items():
        torch.testing.assert_close(seen[name], grad, rtol=1e-4, atol=1e-5 * norm)


@pytest.mark.parametrize("kind", ["llama", "llama-untied"])
@pytest.mark.parametrize("recorded", [True, False])
def test_the_heads_gradient_is_added_up_in_place(
    kind: str, recorded: bool, model_folder: Folder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pack makes a gradient of the head's size for autograd to add: neither over candidates nor over the vocabulary."""
    folder = model_folder(kind)
    groups = [random_group(load(folder), rng, group=0, top=8 if recorded else None)]
    trainer = Trainer(folder, TrainConfig(pack_tokens=1))
    made = []

    def watched(weight: torch.Tensor, parameter: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert parameter is trainer.policy.head
        target, returned = weight_gradient(weight, parameter)
        made.append(returned)
        return target, returned

    for module in ("head", "vocabulary"):
        monkeypatch.setattr(f"farflung.corrections.{module}.weight_gradient", watched)
    trainer.step(groups)
    assert len(made) > 1
    assert all(each is None for each in made)


def test_metrics_by_hand(model_folder: Folder, rng: np.random.Generator) -> None:
    """Two pools, one noisy; a group without variance, a group of one; ages, rewards, lengths, endings."""
    folder = model_folder("llama")
    model = load(folder)
    trained = random_group(model, rng, group=0, sources=(BF16, FP4), version=0)
    flat = random_group(model, rng, group=1, rewards=[1, 1], size=2, version=1)
    lonely = random_group(model, rng, group=2, size=1, version=2, sources=(FP4,))
    lonely = [dataclasses.replace(lonely[0], end=EndReason.FORMAT_ERROR, turns=9)]
    trainer = Trainer(folder, SGD_LIKE)
    trainer.version = 3
    metrics = trainer.step([trained, flat, lonely])
    episodes = trained + flat + lonely
    ages = np.concatenate([3 - e.trajectory.versions for e in episodes])
    tokens = sum(len(e.trajectory.logprobs) for e in trained)
    assert (metrics.update, trainer.version) == (4, 4)
    assert (metrics.trained_groups, metrics.skipped_groups) == (1, 2)
    assert metrics.all.samples == 7
    assert metrics.all.tokens == tokens
    assert metrics.all.reward == pytest.approx(np.mean([e.reward for e in episodes]))
    assert metrics.all.staleness == pytest.approx(ages.mean())
    assert metrics.all.staleness_max == 3
    assert metrics.length == pytest.approx(np.mean([len(e.trajectory.ids) for e in episodes]))
    assert metrics.turns == pytest.approx((6 * 2 + 9) / 7)
    assert metrics.format_errors == pytest.approx(1 / 7)
    assert metrics.lr == 1e-3
    assert metrics.all.kl == pytest.approx(0, abs=1e-6)
    assert metrics.all.masked == 0
    assert metrics.all.entropy > 0.1
    assert metrics.all.vocabulary_entropy > metrics.all.entropy
    assert 0 < metrics.all.head_p < 1
    assert (metrics.all.candidates_p50, metrics.all.candidates_max, metrics.all.singletons) == (5, 5, 0)
    assert metrics.all.ratio == pytest.approx(1, abs=1e-4)
    assert metrics.all.ess == pytest.approx(1, abs=1e-4)
    assert set(metrics.pools) == {"bf16", "nvfp4"}
    assert sum(p.samples for p in metrics.pools.values()) == 7
    assert sum(p.tokens for p in metrics.pools.values()) == tokens
    assert metrics.pools["nvfp4"].staleness_max == 3
    assert UpdateMetrics.from_dict(json.loads(json.dumps(metrics.to_dict(), allow_nan=False))) == metrics
    # The same numbers as the loss itself reports for noisy samplers, split by pool.
    noisy = random_group(model, rng, group=0, sources=(BF16, FP4), noise=1.5)
    fresh = Trainer(folder, SGD_LIKE)
    found = fresh.step([noisy])
    kl: dict[str, list[float]] = {"bf16": [], "nvfp4": []}
    for e in noisy:
        t = e.trajectory
        logits = model(input_ids=torch.from_numpy(t.ids).long()[None]).logits[0].detach()
        for k, at in enumerate(np.flatnonzero(t.action)):
            assert t.supports is not None
            row = t.supports.rows(k, k + 1)
            log_p = logits[at - 1, row.ids.astype(np.int64)].log_softmax(-1).numpy()
            kl[t.sources[t.source[k]].pool].append(float((np.exp(row.logprobs) * (row.logprobs - log_p)).sum()))
    for pool, values in kl.items():
        assert found.pools[pool].kl == pytest.approx(np.mean(values), rel=1e-4)
        assert found.pools[pool].tokens == len(values)
    assert found.all.kl == pytest.approx(np.mean(kl["bf16"] + kl["nvfp4"]), rel=1e-4)
    assert found.all.out_of_band > 0
    assert found.all.masked > 0
    assert found.all.drift > 0
    assert found.all.out_of_tight_band >= found.all.out_of_band
    assert found.all.k2 > 0.01
    assert found.all.ess < 0.99


def test_groups_without_variance_cost_nothing(
    model_folder: Folder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No forward pass, no change of weights, but an update all the same: the run's count goes on."""
    folder = model_folder("llama")
    trainer = Trainer(folder, SGD_LIKE)
    before = masters(trainer)
    flat = random_group(load(folder), rng, rewards=[0, 0, 0, 0])
    monkeypatch.setattr(trainer.policy, "hidden", lambda pack: pytest.fail("a forward pass"))
    metrics = trainer.step([flat])
    assert trainer.version == 1
    assert metrics.skipped_groups == 1
    assert metrics.all.tokens == 0
    assert metrics.all.samples == 4
    assert metrics.grad_norm == 0
    assert all(torch.equal(a, before[n]) for n, a in masters(trainer).items())


def test_skipped_groups_stay_in_the_denominator(model_folder: Folder, rng: np.random.Generator) -> None:
    folder = model_folder("llama")
    group = random_group(load(folder), rng, noise=0.3)
    flat = [dataclasses.replace(e, group=1, reward=1.0) for e in group]
    alone = Trainer(folder, SGD_LIKE).step([group])
    beside = Trainer(folder, SGD_LIKE).step([group, flat])
    assert beside.grad_norm == pytest.approx(alone.grad_norm / 2, rel=1e-4)


def test_aggregation_divides_by_what_was_sampled(model_folder: Folder, rng: np.random.Generator) -> None:
    """Fixed length: the token mean times tokens / (trajectories x length). By sequence: as with lengths of their own."""
    folder = model_folder("llama")
    group = random_group(load(folder), rng, noise=0.3)
    flat = [dataclasses.replace(e, group=1, reward=1.0) for e in group]
    tokens = sum(len(e.trajectory.logprobs) for e in group + flat)

    def norm(groups: list[list[Episode]], **train: object) -> float:
        return Trainer(folder, TrainConfig(clip=1e9, **train)).step(groups).grad_norm  # type: ignore[arg-type]

    mean = norm([group, flat])
    assert norm([group, flat], aggregation="fixed", fixed_length=10) == pytest.approx(mean * tokens / 80, rel=1e-4)
    by_sequence = norm([group], aggregation="sequence")
    assert norm([group, flat], aggregation="sequence") == pytest.approx(by_sequence / 2, rel=1e-4)
    assert by_sequence != pytest.approx(norm([group]), rel=1e-3)
    assert norm([group, flat], baseline="others") == pytest.approx(mean * 4 / 3, rel=1e-4)


def test_guards_take_whole_trajectories_out(model_folder: Folder, rng: np.random.Generator) -> None:
    """Half the group is of version 0, half of version 3: what is too old teaches nothing and stays in the denominator."""
    folder = model_folder("llama")
    model = load(folder)
    old, new = random_group(model, rng, noise=0.3), random_group(model, rng, noise=0.3, version=3)
    mixed = [*old[:2], *new[2:]]

    def step(group: list[Episode], **train: object) -> UpdateMetrics:
        trainer = Trainer(folder, TrainConfig(clip=1e9, pack_tokens=30, **train))  # type: ignore[arg-type]
        trainer.version = 3
        return trainer.step([group])

    free, guarded, none = (step(mixed, staleness_mask=bound) for bound in (3, 2, None))
    assert free.grad_norm == none.grad_norm
    assert free.all.dropped == 0
    assert 0 < guarded.grad_norm < free.grad_norm
    share = sum(len(e.trajectory.logprobs) for e in old[:2]) / sum(len(e.trajectory.logprobs) for e in mixed)
    assert guarded.all.dropped == pytest.approx(share)
    assert step(old, staleness_mask=2).grad_norm == 0
    assert step(mixed, geometric_mask=(0.999, 1.001)).all.dropped == 1
    assert step(mixed, weight="none", gspo=(1.0, 100.0)).all.dropped == 0


@pytest.mark.parametrize("weight", ["none", "is", "tis", "mis", "icepop", "mask", "cispo", "ppo", "dppo"])
def test_every_weight_trains(weight: str, model_folder: Folder, rng: np.random.Generator) -> None:
    folder = model_folder("llama")
    group = random_group(load(folder), rng, noise=1.0)
    metrics = Trainer(folder, TrainConfig(weight=weight, delta=0.05)).step([group])  # type: ignore[arg-type]
    assert metrics.grad_norm > 0
    assert (metrics.all.masked > 0) == (weight in ("mis", "icepop", "mask", "ppo", "dppo"))


def test_order_and_warm_up(model_folder: Folder, rng: np.random.Generator) -> None:
    folder = model_folder("llama")
    group = random_group(load(folder), rng)
    trainer = Trainer(folder, TrainConfig(lr=1e-2, warmup=4))
    assert [trainer.step([group]).lr for _ in range(6)] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


def test_the_same_groups_give_the_same_weights(model_folder: Folder, rng: np.random.Generator) -> None:
    folder = model_folder("qwen3")
    groups = [random_group(load(folder), rng, group=g, noise=0.5) for g in range(3)]
    results = []
    for _ in range(2):
        trainer = Trainer(folder, TrainConfig(pack_tokens=64))
        metrics = [trainer.step(groups).all for _ in range(2)]
        results.append((metrics, masters(trainer)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][n], t) for n, t in results[1][1].items())


def test_without_candidates_nothing_is_centred(model_folder: Folder, rng: np.random.Generator) -> None:
    """Whole-vocabulary sampling: the plain importance-weighted update, with k3 in place of the exact KL."""
    folder = model_folder("llama")
    group = random_group(load(folder), rng, top=None, noise=0.3)
    metrics = Trainer(folder, SGD_LIKE).step([group])
    assert metrics.grad_norm > 0
    assert metrics.all.kl == metrics.all.k3 > 0


def poison(trainer: Trainer, row: int) -> None:
    with torch.no_grad():
        trainer.policy.model.get_input_embeddings().weight[row] = torch.inf


def test_a_loss_that_is_not_finite_names_its_episode(model_folder: Folder, rng: np.random.Generator) -> None:
    """Token 47 of an untied embedding is infinite: only the episode that holds it is named, and nothing changes."""
    folder = model_folder("llama-untied")
    model = load(folder)
    prompt = rng.integers(0, 40, 20).tolist()
    action = [False] * 20 + [True] * 4
    groups = [
        [
            episode(trajectory(model, [*prompt, 3, 47 if (g, i) == (1, 2) else 4, 5, 6], action), float(i % 2), group=g, index=i)
            for i in range(4)
        ]
        for g in range(2)
    ]  # fmt: skip
    trainer = Trainer(folder, TrainConfig())
    trainer.step([groups[0]])
    poison(trainer, 47)
    before, state = masters(trainer), trainer._optimizer.state_dict()
    with pytest.raises(Diverged, match=r"loss is not finite: episode 1.2 \(task-1\)"):
        trainer.step(groups)
    assert trainer.version == 1
    assert all(torch.equal(a, before[n]) for n, a in masters(trainer).items())
    after = trainer._optimizer.state_dict()
    assert all(torch.equal(after["state"][k][s], v) for k, e in state["state"].items() for s, v in e.items())
    assert all(p.grad is None for p in trainer.policy.model.parameters())
    trainer.step([groups[0]])
    assert trainer.version == 2


def test_a_gradient_that_is_not_finite_stops_the_step(
    model_folder: Folder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("llama")
    group = random_group(load(folder), rng)
    trainer = Trainer(folder, TrainConfig())
    before = masters(trainer)
    parameter = trainer.policy.model.model.norm.weight
    parameter.register_hook(lambda grad: grad * torch.nan)
    with pytest.raises(Diverged, match=r"gradient is not finite: episode 0\.0"):
        trainer.step([group])
    assert all(torch.equal(a, before[n]) for n, a in masters(trainer).items())
    assert trainer.version == 0


def test_episodes_of_another_policy_are_refused(model_folder: Folder, rng: np.random.Generator) -> None:
    folder = model_folder("llama")
    trainer = Trainer(folder, TrainConfig())
    good = random_group(load(folder), rng)

    def with_first(**changes: object) -> list[Episode]:
        changed = dataclasses.replace(good[0].trajectory, **changes)  # type: ignore[arg-type]
        return [dataclasses.replace(good[0], trajectory=changed), *good[1:]]

    with pytest.raises(BadInput, match=r"episode 0\.0 \(task-0\): sampled at temperature 0.7, trained at 1.0"):
        trainer.step([with_first(temperature=0.7)])
    ids = good[0].trajectory.ids.copy()
    ids[0] = 99
    with pytest.raises(Corrupt, match=r"episode 0\.0.*do not fit a vocabulary of 48"):
        trainer.step([with_first(ids=ids)])
    with pytest.raises(Corrupt, match="log-probs"):
        trainer.step([with_first(versions=good[0].trajectory.versions[:-1])])
    with pytest.raises(BadInput, match="some episodes of the batch"):
        trainer.step([with_first(supports=None)])
    assert trainer.version == 0
