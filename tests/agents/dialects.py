"""Real tokenizers and chat templates of the families that a model may come from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from farflung.agents.dialect import Dialect

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

COMMAND = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% elif message.role == 'tool' %}<|tool|>{{ message.content }}"
    "{% else %}<|{{ message.role }}|>{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{# calls are written <tool_call>COMMAND</tool_call> #}"
)

_HERMES_HEAD = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"
    '{{- \'\\n</tools>\\nAnswer with <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n\' }}'
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
)
_TOOL_RESULT = (
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
)
_JSON_CALLS = (
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
)

HERMES = (
    _HERMES_HEAD + "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + message.content }}"
    + _JSON_CALLS + "{{- '<|im_end|>\\n' }}" + _TOOL_RESULT + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)  # fmt: skip

# Drops the thinking of replies before the last real question; puts an empty one into the last reply.
THINKING = (
    _HERMES_HEAD + "{%- set ns = namespace(last=0) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content }}" + _JSON_CALLS + "{{- '<|im_end|>\\n' }}" + _TOOL_RESULT + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)

XML = HERMES.replace(
    '{"name": NAME, "arguments": OBJECT}', "<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>"
)

# Names the tools before the last user message only, so that every user message moves them.
MOVES_TOOLS = (
    "{% set ns = namespace(last=0) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% if loop.index0 == ns.last %}[TOOLS]{{ tools | tojson }}<tool_call>[/TOOLS]{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEMPLATES = {"command": COMMAND, "fenced": CHATML, "hermes": HERMES, "thinking": THINKING, "xml": XML}

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|end|>",
    "<|tool|>",
    "<|user|>",
    "<|system|>",
    "<|assistant|>",
)
PLAIN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def tokenizer(merges: Sequence[tuple[str, str]] = (("s", "e"), ("se", "d"), ("Ċ", "Ċ"), ("b", "c"))) -> Tokenizer:
    """Byte-level BPE with a few merges, and the control tokens that the templates use (some special, some not)."""
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    made = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(vocabulary)}, merges=list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    made.add_tokens([AddedToken(text, normalized=False) for text in PLAIN_ADDED])
    return made


def dialect(name: str = "command") -> Dialect:
    made = tokenizer()
    return Dialect(made, TEMPLATES[name], {}, stop_ids=[made.token_to_id("<|endoftext|>")])


def save(folder: Path, template: str | None = COMMAND, made: Tokenizer | None = None) -> Path:
    """A model folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (made or tokenizer()).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
