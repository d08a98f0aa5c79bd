"""farflung ablate: what each part of the correction is worth, measured on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from farflung.cli.args import Parser, check_output, split_overrides
from farflung.cli.recipes import find_recipe
from farflung.core.errors import BadInput, Stopped

DESCRIPTION = """Run the grid of updates - GRPO, +MIS, +SC, +top-p and their combinations, each fed by a mixed and by a homogeneous fleet -
on a small task whose samplers really quantise, and say which of them hold and which collapse. MIS is masked importance
sampling, SC score centering; top-p samples from the likeliest candidates and replays exactly those in the update.

Every setting stands once in the recipe and holds for all arms. Runs are processes of one thread; as many run side by side
as there are cores. A run that is complete is never made again, so a killed ablation goes on when the same command is
given again, and more seeds or arms can be added later."""
EXAMPLES = """  farflung ablate                                          the packaged recipe, one seed of all sixteen arms
  farflung ablate --seeds 3 --summary result.json          seeds 0, 1 and 2, the result as JSON
  farflung ablate --arms GRPO MIS SC+MIS                   these methods, with both fleets
  farflung ablate --arms mixed --ablation.updates 50 --dir runs/taste
  farflung ablate --train.std --dir runs/ablation-std      everything again, advantages divided by their deviation
  farflung ablate my.toml --dry-run                        print the resolved recipe and the runs
"""


def run(argv: Sequence[str]) -> int:
    parser = Parser("ablate", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "recipe",
        nargs="?",
        default="builtin:ablation",
        help="a TOML file, or builtin:NAME for a packaged one (%(default)s)",
    )
    parser.add_argument(
        "--arms", nargs="+", default=[], metavar="ARM", help="fleets, methods, or both as mixed/SC+MIS (all)"
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N - 1 of every arm (%(default)s)")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs side by side (the cores there are)")
    parser.add_argument("--dir", type=Path, help="the ablation's folder, new or to go on with (runs/NAME)")
    parser.add_argument(
        "--summary", type=Path, metavar="FILE", help="write the result as JSON: arm -> rewards, KL growth, collapse"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and the runs")
    parser.add_argument_group(
        "recipe", "any key of the recipe can be set with dots, e.g. --train.lr 1e-4 --task.length 10"
    )
    rest, overrides = split_overrides(argv)
    args = parser.parse_args(rest)
    check_output(args.summary, "--summary")
    for flag in ("seeds", "jobs"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise BadInput(f"{value} is too few", where=f"--{flag}", mend="at least 1")

    from farflung.ablation.arms import choose
    from farflung.ablation.experiment import check_fleets, read_experiment
    from farflung.ablation.folder import Folder, Run

    arms = choose(args.arms)
    experiment = read_experiment(find_recipe(args.recipe, "ablations"), overrides)
    check_fleets(experiment, arms, args.recipe)
    path: Path = args.dir or Path("runs") / experiment.name
    runs = [Run(arm, seed) for seed in range(args.seeds) for arm in arms]
    jobs = args.jobs or max(1, (os.cpu_count() or 1) // experiment.cores)
    if args.dry_run:
        from farflung.config.write import recipe_toml

        print(f"# farflung would make {len(runs)} runs in {path}, {min(jobs, len(runs))} side by side:")
        print("".join(f"#   {run.name}\n" for run in runs))
        print(recipe_toml(experiment.recipe))
        return 0
    folder = Folder.open(path, experiment)

    from rich.console import Console

    from farflung.ablation.page import draw_page
    from farflung.ablation.schedule import carry_out
    from farflung.ablation.summary import show, summarise, write_summary

    console = Console()
    with folder.locked():
        try:
            carry_out(folder, runs, jobs, console)
        except KeyboardInterrupt:
            raise Stopped(
                "stopped by hand", where=str(path), mend="the same command goes on where it stopped"
            ) from None
        finally:  # what is there is a result, also when the ablation was stopped or a run failed
            result = summarise(folder)
            show(result, console)
            if args.summary is not None:
                write_summary(result, args.summary)
            console.print(f"report: {draw_page(folder)}", highlight=False)
    return 0
