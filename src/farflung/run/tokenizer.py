"""The packaged policy's language: a byte-level BPE vocabulary learnt from solved episodes, and its chat template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

END, PAD = "<|end|>", "<|pad|>"
SPECIALS = (
    PAD, END, "<|system|>", "<|tools|>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>",
)  # fmt: skip

# Words with the blank before them, single digits, operators whole and other signs one by one: what the policy has to copy
# out of a file into a command is the same tokens in both. Set phrases of commands are one piece each.
PIECES = (
    r"cat -n|sed -i '|grep -n|tail -n|python3 -m unittest| 2>&1 \| |/core\.py|tests\.test_core\.TestCore|'''|\"\"\"",
    r"[0-9]",
    r" ?[A-Za-z]+",
    r"_",
    r" ?//",
    r" ?[<>=!+*\-]=",
    r" ?[^\sA-Za-z0-9_]",
    r"\s+",
)

# Every message is `<|role|>text<|end|>`; a call of bash is its command between two tokens. Nothing depends on what follows.
TEMPLATE = """\
{%- if tools %}{{ '<|tools|>' }}
{%- for tool in tools %}{{ tool.function.name }}{% if not loop.last %}{{ ' ' }}{% endif %}{% endfor %}
{{- '<|end|>' }}{% endif %}
{%- for message in messages %}{{ '<|' + message.role + '|>' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function.arguments.command + '</tool_call>' }}{% endfor %}
{{- '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def train_tokenizer(texts: Iterable[str], size: int, folder: Path) -> None:
    """Learn a vocabulary of at most ``size`` tokens and write it with the template, as transformers' AutoTokenizer reads it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex("|".join(PIECES)), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
