"""The task: sort the prompt's symbols, with several tries.

An attempt is as many symbols as the prompt has, and a STOP. The environment reads it and says AGAIN, or the trajectory
ends: with reward 1 at the first right attempt, with 0 when the attempts are used up. So who fails talks longest, as agents
do, and has the more tokens with a negative advantage.

A trajectory is laid out with every attempt in its place, whether it was made or not:

    symbols ASK | attempt AGAIN | attempt AGAIN | ... | attempt
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.ablation.recipe import TaskConfig


@dataclass(frozen=True, slots=True)
class Sorting:
    """Token ids: the symbols in their order, then STOP, ASK and AGAIN."""

    symbols: int
    length: int
    attempts: int

    @staticmethod
    def of(task: TaskConfig) -> Sorting:
        return Sorting(task.symbols, task.length, task.attempts)

    @property
    def stop(self) -> int:
        return self.symbols

    @property
    def again(self) -> int:
        return self.symbols + 2

    @property
    def vocabulary(self) -> int:
        return self.symbols + 3

    @property
    def prompt_tokens(self) -> int:
        return self.length + 1

    @property
    def turn_tokens(self) -> int:
        """An attempt with the AGAIN after it."""
        return self.length + 2

    @property
    def answer_tokens(self) -> int:
        """All attempts; nobody says AGAIN after the last."""
        return self.attempts * self.turn_tokens - 1

    def places(self, attempt: int) -> range:
        """Where in the answer an attempt stands."""
        first = attempt * self.turn_tokens
        return range(first, first + self.length + 1)

    def acted(self, attempts: Tensor) -> Tensor:
        """How many attempts were made [count] -> the policy's own tokens, [count, answer_tokens] bool."""
        place = torch.arange(self.answer_tokens)
        own = place % self.turn_tokens <= self.length
        return own & (place < attempts[:, None] * self.turn_tokens)

    def prompts(self, count: int, generator: torch.Generator) -> Tensor:
        """[count, prompt_tokens] ids."""
        symbols = torch.randint(self.symbols, (count, self.length), generator=generator)
        return torch.cat([symbols, torch.full((count, 1), self.symbols + 1)], 1)

    def solution(self, prompts: Tensor) -> Tensor:
        """The right attempt, [count, length + 1]."""
        return torch.cat([prompts[:, :-1].sort(-1).values, torch.full((len(prompts), 1), self.stop)], 1)

    def malformed(self, attempts: Tensor) -> Tensor:
        """attempts [count, length + 1] -> [count] bool: not symbols and then a STOP."""
        return (attempts[:, :-1] >= self.symbols).any(-1) | (attempts[:, -1] != self.stop)

    def demonstrations(self, count: int, slip: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Trajectories [count, prompt + answer] and what of the answer is to be imitated, [count, answer] bool.

        Each begins with some attempts, from none to all but one, that have one symbol wrong, and is imitated in the next.
        There too a symbol is any symbol with the probability ``slip``: whoever shows the task makes mistakes.
        """
        prompts = self.prompts(count, generator)
        turn = torch.cat([self.solution(prompts), torch.full((count, 1), self.again)], 1)
        answer = turn.repeat(1, self.attempts)[:, : self.answer_tokens]
        place = torch.arange(self.answer_tokens)
        attempt, within = place // self.turn_tokens, place % self.turn_tokens
        shown = torch.randint(self.attempts, (count, 1), generator=generator)
        wrong = torch.randint(self.length, (count, self.attempts), generator=generator)[:, attempt]
        slipped = torch.rand(answer.shape, generator=generator) < slip
        noisy = torch.where(attempt < shown, within == wrong, slipped & (within < self.length))
        noise = torch.randint(self.symbols, answer.shape, generator=generator)
        imitated = self.acted(shown[:, 0] + 1) & (attempt == shown)
        return torch.cat([prompts, torch.where(noisy, noise, answer)], 1), imitated
