"""The task's layout, its answers, and what is shown to the first policy."""

from __future__ import annotations

import torch

from farflung.ablation.task import Sorting

TASK = Sorting(symbols=5, length=3, attempts=3)
STOP, ASK, AGAIN = 5, 6, 7


def test_a_prompt_is_symbols_and_ask_and_its_solution_is_sorted_with_a_stop() -> None:
    prompts = TASK.prompts(50, torch.Generator().manual_seed(0))
    assert prompts.shape == (50, 4)
    assert (prompts[:, :3] < 5).all()
    assert (prompts[:, 3] == ASK).all()
    solution = TASK.solution(torch.tensor([[4, 0, 2, ASK]]))
    assert solution.tolist() == [[0, 2, 4, STOP]]


def test_the_policys_own_tokens_are_those_of_the_attempts_that_were_made() -> None:
    assert TASK.answer_tokens == 14
    assert [list(TASK.places(attempt)) for attempt in range(3)] == [[0, 1, 2, 3], [5, 6, 7, 8], [10, 11, 12, 13]]
    acted = TASK.acted(torch.tensor([1, 3]))
    assert acted[0].nonzero().squeeze(1).tolist() == [0, 1, 2, 3]
    assert acted[1].nonzero().squeeze(1).tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13]


def test_malformed_is_what_is_not_symbols_and_a_stop() -> None:
    attempts = torch.tensor([[0, 1, 2, STOP], [0, 1, 2, 3], [0, STOP, 2, STOP], [2, 1, 0, STOP]])
    assert TASK.malformed(attempts).tolist() == [False, True, True, False]


def test_demonstrations_show_one_right_attempt_after_some_wrong_ones() -> None:
    ids, imitated = TASK.demonstrations(300, 0.0, torch.Generator().manual_seed(1))
    prompts, answer = ids[:, :4], ids[:, 4:]
    assert (imitated.sum(-1) == 4).all()
    assert torch.equal(answer[imitated].view(-1, 4), TASK.solution(prompts))
    first = imitated.int().argmax(-1) // TASK.turn_tokens
    assert set(first.tolist()) == {0, 1, 2}
    assert (answer[:, 4] == AGAIN).all()
    late = answer[first == 2][:, :4]
    assert 0.3 < (late != TASK.solution(prompts[first == 2])).any(-1).float().mean() < 1


def test_demonstrations_slip_as_often_as_they_are_told() -> None:
    ids, imitated = TASK.demonstrations(4000, 0.25, torch.Generator().manual_seed(1))
    shown = ids[:, 4:][imitated].view(-1, 4)
    wrong = shown != TASK.solution(ids[:, :4])
    assert not wrong[:, 3].any()
    assert abs(wrong[:, :3].float().mean() - 0.25 * 4 / 5) < 0.02
