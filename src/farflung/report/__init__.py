"""Figures and report.html: what a run did, on one self-contained page."""

from farflung.report.page import write_report

__all__ = ["write_report"]
