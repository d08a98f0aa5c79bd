"""The policy update for off-policy tokens, on torch alone: supports, weights, centering, losses, diagnostics.

One position has a sampler distribution q, a trainer distribution p, a sampled token a and an advantage A. The update is

    A * (w_a s_a - sum_b q_b w_b s_b),    w_b = f(p_b / q_b) without gradient,  s_b = grad log p_b

whose second term is the expectation of the first under q, so a constant advantage moves nothing whatever f is.
"""

from farflung.corrections.advantages import group_advantages
from farflung.corrections.diagnostics import BAND, TokenDiagnostics
from farflung.corrections.head import candidate_logits
from farflung.corrections.loss import candidate_loss, centred_loss, vocabulary_loss
from farflung.corrections.supports import Supports
from farflung.corrections.vocabulary import vocabulary_log_probs
from farflung.corrections.weights import Masked, Plain, Weight, make_weight

__all__ = [
    "BAND",
    "Masked",
    "Plain",
    "Supports",
    "TokenDiagnostics",
    "Weight",
    "candidate_logits",
    "candidate_loss",
    "centred_loss",
    "group_advantages",
    "make_weight",
    "vocabulary_log_probs",
    "vocabulary_loss",
]
