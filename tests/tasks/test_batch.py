"""A batch of working trees in one sandbox gives what a sandbox each would give."""

from __future__ import annotations

from itertools import islice

import pytest

from farflung.config import SandboxConfig
from farflung.sandboxes import SandboxError, open_factory, probe
from farflung.tasks.batch import Batch
from farflung.tasks.repair import generate, module_path

pytestmark = pytest.mark.skipif(probe("bubblewrap") is not None, reason=str(probe("bubblewrap")))
TASKS = list(islice(generate(12), 4))


async def test_commands_print_and_return_what_they_do_in_a_sandbox_of_their_own() -> None:
    factory = open_factory(SandboxConfig())
    batch = await Batch.open(factory, [task.files for task in TASKS])
    jobs = []
    for number, task in enumerate(TASKS):
        jobs += [(number, f"cat -n {module_path(task)}"), (number, "python3 -m unittest 2>&1 | tail -n 1")]
        jobs += [(number, "python3 -m unittest 2>&1 | grep FAIL"), (number, "grep -n nothing tests/test_core.py")]
        jobs += [(number, "python3 -c 'print(1 + 1)'; exit 3")]
    together = await batch.run(jobs)
    await batch.close()
    for (number, command), shared in zip(jobs, together, strict=True):
        box = await factory.open(TASKS[number].files)
        alone = await box.exec(command, seconds=20, max_bytes=1 << 20)
        await box.close()
        assert (shared.exit_code, shared.output) == (alone.exit_code, alone.output), command


async def test_an_edit_between_two_test_runs_counts_and_stays_in_its_tree() -> None:
    task = TASKS[0]
    path = module_path(task)
    batch = await Batch.open(open_factory(SandboxConfig()), [task.files, task.files])
    test = "python3 -m unittest 2>&1 | tail -n 1"
    write = f"cat > {path} <<'END'\n{task.fix[path]}END"
    results = await batch.run([(0, test), (0, write), (0, test), (1, test)])
    assert [r.output.split()[0] for r in results if r.output] == ["FAILED", "OK", "FAILED"]
    first, second = await batch.trees()
    assert (first[path], second[path]) == (task.fix[path], task.files[path])
    await batch.close()


async def test_a_job_that_the_driver_cannot_run_is_a_failure_of_the_machinery() -> None:
    batch = await Batch.open(open_factory(SandboxConfig()), [TASKS[0].files])
    with pytest.raises(SandboxError, match="batch ended"):
        await batch.run([(5, "true")])
    await batch.close()
