"""farflung doctor: what this machine is, and what would go wrong on it."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from farflung.cli.args import Parser
from farflung.cli.recipes import find_recipe, parse
from farflung.core.errors import FarflungError

if TYPE_CHECKING:
    from farflung.config import Recipe

State = Literal["ok", "warn", "fail"]
GIB = 1 << 30

DESCRIPTION = "Look at this machine and at what a recipe asks of it. The exit code is 1 if something would not work."
EXAMPLES = """  farflung doctor                   for the quickstart
  farflung doctor my.toml           for a recipe of yours
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """``mend`` says what to do unless the state is ok."""

    what: str
    state: State
    seen: str
    mend: str = ""


def run(argv: Sequence[str]) -> int:
    parser = Parser("doctor", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "recipe", nargs="?", default="builtin:quickstart", help="recipe to check for (builtin:quickstart)"
    )
    args, overrides = parse(parser, argv)

    from rich.console import Console
    from rich.table import Table

    from farflung.config import load_recipe

    recipe = load_recipe(find_recipe(args.recipe), overrides)
    console = Console()
    findings = []
    with console.status("looking at this machine") as status:
        for name, check in CHECKS.items():
            status.update(f"looking at {name}")
            findings.append(_checked(name, check, recipe))
    table = Table(box=None, padding=(0, 2), show_header=False)
    colors = {"ok": "green", "warn": "yellow", "fail": "red"}
    for finding in findings:
        table.add_row(f"[{colors[finding.state]}]{finding.state}[/]", finding.what, _plain(finding))
    console.print(table, highlight=False)
    failed = sum(finding.state == "fail" for finding in findings)
    warned = sum(finding.state == "warn" for finding in findings)
    console.print(f"{failed} of {len(findings)} checks failed, {warned} warned, for {args.recipe}", highlight=False)
    return 1 if failed else 0


def _plain(finding: Finding) -> str:
    from rich.markup import escape

    return escape(finding.seen) + (f"\n[dim]→ {escape(finding.mend)}[/]" if finding.mend else "")


def _checked(name: str, check: Callable[[Recipe], Finding], recipe: Recipe) -> Finding:
    """A check that breaks is a finding too."""
    try:
        return check(recipe)
    except FarflungError as error:
        return Finding(name, "fail", error.what, error.mend or f"see {error.where}")
    except Exception as error:  # whatever is wrong with this machine must not keep the other checks from being made
        return Finding(name, "fail", f"{type(error).__name__}: {error}", "please report it if the cause is not yours")


def check_python(recipe: Recipe) -> Finding:
    seen = f"{platform.python_version()} ({platform.machine()}, {platform.system()}), {sys.prefix}"
    if sys.version_info < (3, 11) or sys.maxsize < 1 << 32:
        return Finding("Python", "fail", seen, "a 64-bit Python 3.11 or newer is needed")
    if platform.system() == "Windows":
        return Finding("Python", "fail", seen, "use Linux or macOS; on Windows, WSL 2 is a Linux")
    return Finding("Python", "ok", seen)


def check_threads(recipe: Recipe) -> Finding:
    """torch's OpenMP threads spin: more of them than cores, and every process crawls."""
    from farflung.run.processes import child_environment

    cores, environment = usable_cores(), child_environment()
    threads = int(environment["OMP_NUM_THREADS"])
    embedded = sum(pool.replicas for pool in recipe.pools if pool.engine == "embedded")
    seen = (
        f"{cores} cores; a run has {1 + embedded} torch processes (trainer, {embedded} samplers) of {threads} thread"
        f"{'s' if threads > 1 else ''} each, {environment['OMP_WAIT_POLICY'].lower()} while they wait"
    )
    if threads > 1 and threads * (1 + embedded) > cores:
        return Finding(
            "cores and threads", "fail", seen, "set OMP_NUM_THREADS=1: waiting threads spin and starve the others"
        )
    if 1 + embedded > 4 * cores:
        mend = "start fewer samplers with more capacity each (pools.NAME.replicas, pools.NAME.capacity)"
        return Finding("cores and threads", "warn", seen, mend)
    own = os.environ.get("OMP_NUM_THREADS", "")
    if own.isdigit() and int(own) > 1 and os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        mend = "set OMP_WAIT_POLICY=PASSIVE beside it, or a sampler that you start by hand spins while it waits"
        return Finding("cores and threads", "warn", f"{seen}; your shell sets OMP_NUM_THREADS={own}", mend)
    return Finding("cores and threads", "ok", seen)


def check_memory(recipe: Recipe) -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    limit = _cgroup_memory()
    free = min(memory.available, limit) if limit else memory.available
    seen = f"{free / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB" + (
        f" (limit {limit / GIB:.1f})" if limit else ""
    )
    processes = 3 + sum(pool.replicas for pool in recipe.pools)
    needed = 0.6 * processes * GIB
    if free < needed:
        mend = (
            f"about {needed / GIB:.1f} GiB are needed for {processes} processes and a small model; close something else"
        )
        return Finding("memory", "warn", seen, mend)
    return Finding("memory", "ok", seen)


def check_disk(recipe: Recipe) -> Finding:
    here = shutil.disk_usage(Path.cwd()).free
    temporary = shutil.disk_usage(tempfile.gettempdir()).free
    seen = f"{here / GIB:.1f} GiB free here, {temporary / GIB:.1f} GiB in {tempfile.gettempdir()}"
    if not os.access(Path.cwd(), os.W_OK):
        return Finding("disk", "fail", f"{Path.cwd()} cannot be written", "run it elsewhere, or give --dir")
    if min(here, temporary) < GIB // 4:
        return Finding(
            "disk", "fail", seen, "a run needs some hundred megabytes for episodes, checkpoints and versions"
        )
    return Finding(
        "disk", "ok" if min(here, temporary) > GIB else "warn", seen, "" if here > GIB else "free some space"
    )


def check_shared_memory(recipe: Recipe) -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("/dev/shm", "ok", "not here, not needed")
    free = shutil.disk_usage(path).free
    state: State = "ok" if free >= 64 << 20 else "warn"
    mend = "" if state == "ok" else "give the container more: --shm-size=1g"
    return Finding("/dev/shm", state, f"{free / GIB:.2f} GiB free", mend)


def check_torch(recipe: Recipe) -> Finding:
    import torch

    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    else:
        device = f"CPU ({torch.backends.cpu.get_cpu_capability()})"
    seen = f"{torch.__version__}, {build}, computes on {device}"
    if torch.version.cuda and not torch.cuda.is_available():
        return Finding(
            "torch",
            "warn",
            seen,
            "no GPU can be used; the CPU build is gigabytes smaller (remove .venv, make quickstart)",
        )
    return Finding("torch", "ok", seen)


def check_sandbox(recipe: Recipe) -> Finding:
    from farflung.sandboxes import probe

    kind = recipe.sandbox.kind
    trouble = probe(kind)
    if trouble:
        return Finding("sandbox", "fail", f"{kind} cannot run here: {trouble.splitlines()[0]}",
                       " ".join(line.strip() for line in trouble.splitlines()[1:])
                       or "--sandbox.kind process isolates nothing: only where the model is trusted")  # fmt: skip
    if kind == "process":
        return Finding(
            "sandbox", "warn", "plain processes: commands of the model run as you", "use bubblewrap where it runs"
        )
    return Finding("sandbox", "ok", f"{kind}: no network, a file system of its own, limits hold")


def check_model(recipe: Recipe) -> Finding:
    from farflung.agents.dialect import Dialect
    from farflung.run.workspace import resolve_model

    if not recipe.model.path.startswith("builtin:") and not Path(recipe.model.path).expanduser().is_dir():
        return Finding("model", "warn", f"{recipe.model.path} is not here", "the first run fetches it from the Hub")
    folder = resolve_model(recipe.model.path)
    dialect = Dialect.load(folder, recipe.model.tool_format)
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder)
    return Finding(
        "model",
        "ok",
        f"{recipe.model.path}: {model.num_parameters() / 1e6:.1f}M parameters, calls as {dialect.tool_format}",
    )


def check_tasks(recipe: Recipe) -> Finding:
    from farflung.evaluation.contamination import require_disjoint
    from farflung.tasks.files import load_tasks

    train, heldout = load_tasks(recipe.tasks.train), load_tasks(recipe.tasks.heldout)
    require_disjoint(train, heldout)
    return Finding("tasks", "ok", f"{len(train)} to learn from, {len(heldout)} held out, none in both")


def check_ports(recipe: Recipe) -> Finding:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        client.settimeout(5)
        client.connect(server.getsockname())
    return Finding("loopback", "ok", "programs on this machine reach each other at 127.0.0.1")


CHECKS: dict[str, Callable[[Recipe], Finding]] = {
    "Python": check_python,
    "cores and threads": check_threads,
    "memory": check_memory,
    "disk": check_disk,
    "/dev/shm": check_shared_memory,
    "loopback": check_ports,
    "torch": check_torch,
    "sandbox": check_sandbox,
    "model": check_model,
    "tasks": check_tasks,
}


def usable_cores() -> int:
    """Cores that this process may use: affinity, and a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def _cgroup_memory() -> int | None:
    """What a container still allows, or None without a limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
