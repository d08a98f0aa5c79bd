"""Figures and report.html: what a run did, on one self-contained page."""

from farflung.report.page import draw_report

__all__ = ["draw_report"]
