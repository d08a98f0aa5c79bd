"""farflung report: draw a run's report.html."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from farflung.cli.args import Parser

DESCRIPTION = "Draw a run's report: one self-contained page with curves, pools, drops and three episodes to read."
EXAMPLES = """  farflung report runs/quickstart --open
  farflung report runs/quickstart --out /tmp/now.html      while the run goes on, too
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("report", DESCRIPTION, EXAMPLES)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (RUN/report.html)")
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    args = parser.parse_args(argv)

    from farflung.report import draw_report

    page = draw_report(args.run, args.out)
    print(page)
    if args.open:
        webbrowser.open(page.absolute().as_uri())
    return 0
