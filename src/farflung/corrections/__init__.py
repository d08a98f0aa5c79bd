"""The policy update for off-policy tokens, on torch alone: supports, weights, centering, guards, losses, diagnostics.

One position has a sampler distribution q, a trainer distribution p, a sampled token a and an advantage A. The update is

    A * (w_a s_a - sum_b q_b w_b s_b),    w_b = f(p_b / q_b) without gradient,  s_b = grad log p_b

whose second term is the expectation of the first under q, so a constant advantage moves nothing whatever f is.
"""

from farflung.corrections.advantages import group_advantages
from farflung.corrections.aggregation import denominators
from farflung.corrections.centering import Coefficients, coefficients
from farflung.corrections.diagnostics import BAND, TIGHT_BAND, TokenDiagnostics
from farflung.corrections.guards import Guards
from farflung.corrections.loss import candidate_loss, centred_loss, vocabulary_loss
from farflung.corrections.supports import Supports, check_echo, check_sampled
from farflung.corrections.weights import (
    WEIGHTS,
    Clipped,
    DifferenceMask,
    Masked,
    Plain,
    PpoClip,
    Weight,
    make_weight,
)

__all__ = [
    "BAND",
    "TIGHT_BAND",
    "WEIGHTS",
    "Clipped",
    "Coefficients",
    "DifferenceMask",
    "Guards",
    "Masked",
    "Plain",
    "PpoClip",
    "Supports",
    "TokenDiagnostics",
    "Weight",
    "candidate_loss",
    "centred_loss",
    "check_echo",
    "check_sampled",
    "coefficients",
    "denominators",
    "group_advantages",
    "make_weight",
    "vocabulary_loss",
]
