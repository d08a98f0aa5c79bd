"""Score centering: the coefficients of one update and its gradient in the logits, in closed form.

At one position let s_b = grad log p(b), w_b = f(p_b / q_b) and m_b = q_b w_b, all weights without gradient. The update

    A (w_a s_a - sum_b m_b s_b)

has expectation zero over a ~ q whenever A is constant, for every f ("Score Centering Stabilizes Off-policy Reinforcement
Learning", arXiv 2609.20807, equations 9 and 14). It is the gradient of A (w_a log p_a - sum_b c_b log p_b), where

- "top_p" records all of q, so c = m;
- "top_k" records a head H. The tail is modelled as q_b = rho p_b with rho = (1 - Q_H) / (1 - P_H) (equation 12). There p/q
  is the one number 1 / rho, the mass is alpha p_b with alpha = rho f(1 / rho), and because sum_b p_b s_b = 0 the tail
  folds onto the head: c_b = m_b - alpha p_b on H and 0 elsewhere. With nothing recorded c is empty: not centred. What a
  mask does inside the tail is invisible to this; only "top_p" is exact.

With z the logits after temperature, C = sum_b c_b and p over whatever log p is normalised over (the candidates, or the
vocabulary), the gradient is

    dJ/dz_j = A (w_a 1[j = a] - c_j - (w_a - C) p_j)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farflung.corrections.supports import Supports
from farflung.corrections.weights import Weight

TAIL_FLOOR = 1e-6
"""Less mass than this outside the head cannot be told from rounding: both tails are taken to be at least this."""

RARE = -8.0
"""Log-probability at most at which a weight is evaluated for the tail: one of its tokens is rare, however much they sum to."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What an update needs beside p, without gradient.

    sampled [rows]: w_a. candidates [n]: c_b of every recorded candidate; total [rows]: C, their sum. log_rho [rows]: log
    of q's tail over p's, 0 with "top_p". head_q, head_p [rows]: the mass of q and p on the candidates.
    """

    sampled: Tensor
    candidates: Tensor
    total: Tensor
    log_rho: Tensor
    head_q: Tensor
    head_p: Tensor

    def uncentred(self) -> Coefficients:
        """The same update without its second term."""
        zero = torch.zeros_like
        return replace(self, candidates=zero(self.candidates), total=zero(self.total))

    def objective(self, log_p: Tensor, log_p_sampled: Tensor, supports: Supports) -> Tensor:
        """w_a log p_a - sum_b c_b log p_b, [rows]; log_p [n] of the candidates and log_p_sampled [rows] may have a gradient."""
        return self.sampled * log_p_sampled - supports.sum(self.candidates * log_p)


@torch.no_grad()
def coefficients(
    log_p: Tensor,
    log_p_sampled: Tensor,
    supports: Supports,
    log_q_sampled: Tensor,
    advantages: Tensor,
    weight: Weight,
) -> Coefficients:
    """The coefficients of each row from log-probabilities alone; rows are independent, so any part of a batch will do.

    log_p [n] of the recorded candidates under the trainer, normalised over them ("top_p") or over the vocabulary
    ("top_k"); log_p_sampled, log_q_sampled [rows] of the sampled tokens under the trainer and as recorded; advantages
    [rows]. Everything is worked out in log_p's type, which should be float32 or wider.
    """
    rows = supports.rows
    log_q, advantages = supports.logprobs.to(log_p.dtype), advantages.to(log_p.dtype)
    sampled, _ = weight(log_p_sampled, log_q_sampled.to(log_p.dtype), advantages)
    _, mass = weight(log_p, log_q, advantages[rows])
    if supports.kind == "top_p":
        one = torch.ones_like(sampled)
        return Coefficients(sampled, mass, supports.sum(mass), torch.zeros_like(one), one, one)
    p = log_p.exp()
    head_q, head_p = supports.sum(log_q.exp()), supports.sum(p)
    log_q_tail, log_p_tail = ((1 - head).clamp(min=TAIL_FLOOR).log() for head in (head_q, head_p))
    log_rho = log_q_tail - log_p_tail
    log_p_rare = RARE - log_rho.clamp(min=0)
    _, mass_rare = weight(log_p_rare, RARE + log_rho.clamp(max=0), advantages)
    alpha = mass_rare / log_p_rare.exp()
    residual = mass - alpha[rows] * p
    return Coefficients(sampled, residual, supports.sum(residual), log_rho, head_q, head_p)
