"""The card of a warm-started policy: how it was made, where it starts, what it can and cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farflung.evaluation.held_out import EvalResult

if TYPE_CHECKING:
    from farflung.run.warmstart import Plan

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# A small agent that repairs Python packages

A Llama of {parameters:,} parameters ({layers} layers, width {width}, a byte-level BPE vocabulary of {vocabulary} tokens)
that repairs small Python packages with one injected bug: it looks (`cat -n`, `grep`), edits (`sed -i`), may run the tests,
and ends with `submit`. It is the starting point of farflung's quickstart, and on purpose an unfinished one.

## Where it starts

On {tasks} held-out tasks, sampled {samples} times each from the whole vocabulary at temperature 1: **pass@1 {pass1}**
(standard error over tasks), {turns:.1f} turns and {tokens:.0f} tokens an episode.

## How it was made

`{command}` makes it again, the same for the same seed:

1. A generator writes packages of two to four short documented functions with tests, and puts one bug into each; three
   seeds give held-out tasks, training tasks and the tasks of the demonstrations. No module occurs in two of them, however
   its functions are called and documented.
2. Every packaged task is proved: its tests fail before the reference fix and pass after it.
3. A scripted solver that knows the fix solves {demonstrations:,} tasks in the real sandbox. It has a bad habit: in {blind:.0%}
   of its episodes it edits without having looked, and submits. In {careless:.0%} of the others its first repair is wrong, so
   that it sees the tests fail, looks again and repairs again. Only solved episodes are kept.
4. A vocabulary is learnt from the episodes, and the model is trained on them for {steps:,} steps of {batch} episodes. What
   the solver writes counts fully, what it reads a little, its wrong repairs not at all (loss of its own tokens at the end:
   {loss:.3f}).

Where the solver edits blindly it is right, since it knows the fix; the policy that copies that habit has to guess.
Reinforcement learning finds out which habits pay.

## What it can be used for

It can repair modules that it has never seen, made of the {forms} kinds of functions that the generator knows, with other
names, arguments, constants, wordings, orders and bugs. It knows nothing else: no other Python, no other wording of the
problem, no English beyond the generator's sentences. It is a test object for training systems, not an assistant.

## Chat format

Every message is `<|role|>text<|end|>`; a call of the tool `bash` is `<tool_call>COMMAND</tool_call>`. The template in the
tokenizer writes both.

Licence: Apache-2.0. Tasks, demonstrations and weights were all made by this program; no other data went in.
"""


def model_card(plan: Plan, loss: float, result: EvalResult) -> str:
    """README.md of the policy's folder."""
    from farflung.run.supervised import Shape
    from farflung.tasks.forms import FORMS

    shape = Shape()
    block = 4 * shape.width**2 + 3 * shape.width * shape.hidden + 2 * shape.width
    return CARD.format(
        parameters=shape.vocabulary * shape.width + shape.layers * block + shape.width,
        layers=shape.layers,
        width=shape.width,
        vocabulary=shape.vocabulary,
        tasks=len(result.tallies),
        samples=max(tally.samples for tally in result.tallies.values()),
        pass1=result.pass_at(1),
        turns=result.turns,
        tokens=result.tokens,
        command=plan.command,
        demonstrations=plan.demonstrations,
        blind=plan.habits.blind,
        careless=plan.habits.careless,
        steps=plan.steps,
        batch=plan.batch,
        loss=loss,
        forms=len(FORMS),
    )
