"""What SGLang and vLLM answer, turned into what the loss takes.

    python examples/engine_replies.py                              the two replies beside this file
    python examples/engine_replies.py --sglang REPLY.json          one of your own server

``replies/`` holds one generation of six tokens (temperature 0.8, top_k 4, top_p 0.9) in the format of each engine. They
were written after the engines' published formats, not captured from a server.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from farflung.corrections import Supports, candidate_loss, make_weight
from farflung.engines.replies import Reply, read_sglang, read_vllm

HERE = Path(__file__).parent / "replies"
TEMPERATURE = 0.8


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def supports_of(reply: Reply) -> Supports:
    """On the trainer's side: int64 ids and offsets, float32 log-probabilities."""
    return Supports(
        torch.from_numpy(reply.supports.ids).long(),
        torch.from_numpy(reply.supports.logprobs),
        torch.from_numpy(reply.supports.offsets),
    )


def describe(engine: str, reply: Reply) -> None:
    print(f"{engine}: {len(reply.ids)} tokens, {reply.finish}, candidates per token {reply.supports.sizes.tolist()}")
    for span in reply.spans:
        print(f"  tokens {span.start}..{span.stop - 1} from weights {span.version}")


def step(reply: Reply) -> None:
    """One loss with made-up hidden states and LM head, as a trainer would take it over this completion."""
    torch.manual_seed(0)
    vocabulary = 1 + int(max(reply.supports.ids))
    hidden = torch.randn(len(reply.ids), 16, requires_grad=True)
    head = torch.randn(vocabulary, 16) / 4
    loss, found = candidate_loss(
        hidden,
        head,
        None,
        supports_of(reply),
        torch.from_numpy(reply.ids).long(),
        torch.full((len(reply.ids),), 0.5),  # the completion's advantage, for each of its tokens
        weight=make_weight("mis", (0.5, 5.0)),
        temperature=TEMPERATURE,
        denominator=len(reply.ids),
    )
    loss.backward()
    assert hidden.grad is not None
    print("  KL(q||p) per token ", [round(value, 3) for value in found.kl.tolist()])
    print("  masked             ", found.masked.tolist())
    print("  gradient per token ", [round(value, 3) for value in hidden.grad.norm(dim=1).tolist()])


def main() -> None:
    parser = argparse.ArgumentParser(description="Read engines' replies into the loss.")
    parser.add_argument("--sglang", type=Path, default=HERE / "sglang.json", help="an answer of /generate")
    parser.add_argument("--vllm", type=Path, default=HERE / "vllm.json", help="an answer of /inference/v1/generate")
    args = parser.parse_args()
    for engine, reply in (
        ("SGLang", read_sglang(load(args.sglang))),
        ("vLLM", read_vllm(load(args.vllm)["choices"][0])),
    ):
        describe(engine, reply)
        step(reply)


if __name__ == "__main__":
    main()
