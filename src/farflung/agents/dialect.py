"""A model's dialect: its tokenizer, its chat template and its way of writing a call. Token in, token out.

What the policy sampled is never decoded and tokenised again. A dialect only tokenises what others say (the opening, a
tool's output, a correction), once, as the suffix that follows the ids so far. The template is rendered on a dummy
conversation to learn that suffix; it is what follows the end token of the dummy's last reply. Thinking stays in the
transcript as it was sampled, also where a template would drop it from earlier turns.

Text from outside is never read as control tokens: an output that prints ``<|im_end|>`` becomes ordinary text tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from farflung.agents import calls
from farflung.agents.calls import BASH_TOOL, Call, NoCall, Reason, ToolFormat
from farflung.core.errors import BadInput
from farflung.core.supports import Int32

_BREAK = "\U000f0b4b"  # private use: parts a control token's text in two; the parts are tokenised one by one
_MARKS = ("REPLY-ONE", "REPLY-TWO")
_THINKING = re.compile(r"<think>\s*(</think>\s*)?$")
_WANTED = "Reply with exactly one call of bash, written like this:\n"
_CORRECTIONS: dict[Reason, str] = {
    "empty": "The reply was empty. ",
    "text": "The reply had no call. ",
    "malformed": "The call could not be read. ",
    "cut": "The reply was too long and was cut before its call. ",
}

Message = dict[str, Any]


class Dialect:
    """Speaks for one model. Raises BadInput at construction if its template cannot carry a growing transcript.

    ``stop_ids`` end a reply; the first of them is the template's own end of an assistant turn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        specials: Mapping[str, str],
        *,
        tool_format: ToolFormat | Literal["auto"] = "auto",
        stop_ids: Sequence[int] = (),
        where: str = "model",
    ) -> None:
        if not template:
            raise BadInput(
                "the model has no chat template",
                where=where,
                mend="use an instruct or chat model, or put its template into the folder as chat_template.jinja",
            )
        self._tokenizer = tokenizer
        self._template = template
        self._specials = dict(specials)
        self._where = where
        self.tool_format: ToolFormat = calls.detect(template) if tool_format == "auto" else tool_format
        self._tools = [BASH_TOOL] if self.tool_format != "fenced" and "tools" in template else None
        self._end, end_id = self._find_end(stop_ids)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((end_id, *stop_ids)))
        self._verify()

    @staticmethod
    def load(folder: Path | str, tool_format: ToolFormat | Literal["auto"] = "auto") -> Dialect:
        """Read tokenizer and template from a model folder in Hugging Face format, without loading torch."""
        folder = Path(folder)
        config = _json(folder / "tokenizer_config.json")
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception, also for a missing file
            raise BadInput(
                f"cannot read tokenizer.json: {error}",
                where=str(folder),
                mend="load the tokenizer with transformers and save it: AutoTokenizer.from_pretrained(X).save_pretrained(X)",
            ) from None
        specials = {k: v if isinstance(v, str) else v.get("content", "") for k, v in config.items()
                    if k.endswith("_token") and isinstance(v, str | dict)}  # fmt: skip
        stops = _json(folder / "generation_config.json").get("eos_token_id") or []
        stops = [stops] if isinstance(stops, int) else list(stops)
        eos = tokenizer.token_to_id(specials.get("eos_token", ""))
        return Dialect(
            tokenizer,
            _read_template(folder, config),
            specials,
            tool_format=tool_format,
            stop_ids=[*([eos] if eos is not None else []), *stops],
            where=str(folder),
        )

    def opening(self, system: str, user: str) -> Int32:
        """The ids that an episode begins with, up to where the first reply starts. ``user`` comes from outside.

        An empty ``system`` leaves that message out. Templates that take tools are given bash.
        """
        return self._encode(self._render(_opening(system, self._escape(user)), reply_next=True))

    def observation(self, text: str, after: Int32) -> Int32:
        """What follows the reply that ends ``after``: the output of its command, up to where the next reply starts."""
        return self._suffix(self._result(self._escape(text)), after)

    def correction(self, reason: Reason, after: Int32) -> Int32:
        """What follows a reply without a usable call."""
        text = _CORRECTIONS[reason] + _WANTED + calls.write("COMMAND", self.tool_format)
        return self._suffix({"role": "user", "content": text}, after)

    def reply(self, command: str) -> Int32:
        """A whole reply that calls ``command``, as ids: what a scripted policy "samples"."""
        parts = calls.write(_MARKS[0], self.tool_format).split(_MARKS[0])
        if self.tool_format == "hermes":
            command = json.dumps(command, ensure_ascii=False)[1:-1]
        return self._encode(self._escape(command).join(parts) + self._end)

    def parse(self, ids: Int32) -> Call | NoCall:
        """Read a sampled reply."""
        ended = len(ids) > 0 and int(ids[-1]) in self.stop_ids
        return calls.read(self.decode(ids[:-1] if ended else ids), self.tool_format, ended=ended)

    def decode(self, ids: Int32) -> str:
        """Text to read, control tokens included; never to be tokenised again."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def instructions(self) -> str:
        """How to work, for a system message. Empty for the command form: its models are trained for nothing else."""
        if self.tool_format == "command":
            return ""
        form = " " if self._tools else f" Write the call like this:\n{calls.write('COMMAND', self.tool_format)}\n"
        return (
            "You repair a Python repository. The working directory is its root. Every reply makes exactly one call of "
            f"bash and then waits for the output.{form}Look at the code first, then edit it with commands "
            "such as sed. The tests of the repository show what is expected; changes to them do not count. "
            "When the fault is mended, call the single command: submit"
        )

    # Rendering

    def _render(self, messages: list[Message], *, reply_next: bool) -> str:
        try:
            rendered, _ = render_jinja_template(
                [messages],
                tools=self._tools,
                chat_template=self._template,
                add_generation_prompt=reply_next,
                preserve_thinking=True,
                **self._specials,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise BadInput(
                f"the chat template cannot render the messages {roles}: {error}", where=self._where
            ) from None
        return str(rendered[0])

    def _dummy(self, mark: str) -> Message:
        """A reply with a call in it, as the template wants to see it."""
        if self.tool_format in ("command", "fenced"):
            return {"role": "assistant", "content": calls.write(mark, self.tool_format)}
        call = {"name": "bash", "arguments": {"command": mark}}
        tool_calls = [{"id": "call00000", "type": "function", "function": call}]
        return {"role": "assistant", "content": "", "tool_calls": tool_calls}

    def _result(self, text: str) -> Message:
        """A command's output, as the template wants to see it."""
        return (
            {"role": "user", "content": text}
            if self.tool_format == "fenced"
            else {
                "role": "tool",
                "name": "bash",
                "content": text,
            }
        )

    def _suffix(self, message: Message, after: Int32) -> Int32:
        """Ids of ``message`` and of the opening of the reply to it; they begin with the end token if ``after`` lacks it."""
        text = self._suffix_text([*_opening("", "TASK"), self._dummy(_MARKS[0]), message], _MARKS[0])
        ids = self._encode(self._end + text)
        return ids[1:] if len(after) and after[-1] == ids[0] else ids

    def _suffix_text(self, messages: list[Message], mark: str) -> str:
        rendered = self._render(messages, reply_next=True)
        return rendered[self._after_reply(rendered, mark) :]

    def _after_reply(self, rendered: str, mark: str) -> int:
        """Where the reply that holds ``mark`` is over."""
        at = rendered.find(mark)
        end = rendered.find(self._end, at)
        if at < 0 or end < 0:
            raise self._rewrites("leaves a reply out")
        return end + len(self._end)

    # Control tokens

    @cached_property
    def _control(self) -> re.Pattern[str]:
        """Matches where the text of an added token starts; tokens of one character or of blanks can't do harm."""
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        texts = sorted((t for t in added if len(t) > 1 and not t.isspace()), key=len, reverse=True)
        return re.compile("(?=" + "|".join(map(re.escape, texts)) + ")." if texts else r"(?!)", re.DOTALL)

    def _escape(self, text: str) -> str:
        """Part every control token's text, so that it is tokenised as the characters that it is made of."""
        return self._control.sub(lambda match: match[0] + _BREAK, text.replace(_BREAK, ""))

    def _encode(self, text: str) -> Int32:
        parts = (self._tokenizer.encode(part, add_special_tokens=False).ids for part in text.split(_BREAK))
        return np.array([i for ids in parts for i in ids], np.int32)

    # Checks

    def _find_end(self, stop_ids: Sequence[int]) -> tuple[str, int]:
        """The control token that ends an assistant turn, as text and id: the first after it, a known stop before others."""
        rendered = self._render([*_opening("", "TASK"), {"role": "assistant", "content": _MARKS[0]}], reply_next=False)
        tail = rendered.rpartition(_MARKS[0])[2]
        added = {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items()}
        found = [
            (added[text] not in stop_ids, tail.find(text), -len(text), text)
            for text in added
            if text.strip() and text in tail
        ]
        if not found:
            raise BadInput("the chat template ends an assistant turn without a token of its own", where=self._where)
        end = min(found)[3]
        return end, added[end]

    def _verify(self) -> None:
        """The transcript of two turns must begin with the opening and grow by the same suffixes at any depth.

        Thinking and blanks may differ: several templates leave a newline out after what is last.
        """
        opening = _opening(self.instructions(), "TASK")
        first, second = self._dummy(_MARKS[0]), self._dummy(_MARKS[1])
        for message in ({"role": "user", "content": "MESSAGE"}, self._result("MESSAGE")):
            role = message["role"]
            rendered = self._render([*opening, first, message, second, message], reply_next=True)
            suffix = self._suffix_text([*opening, first, message], _MARKS[0])
            grown = rendered[self._after_reply(rendered, _MARKS[0]) :]
            start = _bare(self._render(opening, reply_next=True))
            if not _bare(rendered).startswith(start) or "MESSAGE" not in suffix:
                raise self._rewrites("moves or leaves out what came before the first reply")
            if not _bare(grown).startswith(_bare(suffix)):
                raise self._rewrites(f"shows an earlier {role} message differently later on")
            if _bare(grown[self._after_reply(grown, _MARKS[1]) :]) != _bare(suffix):
                raise self._rewrites(f"shows a {role} message differently in later turns")
            if self._suffix_text([*_opening("", "TASK"), first, message], _MARKS[0]) != suffix:
                raise self._rewrites(f"shows a {role} message differently without a system message")
        sample = "sed -i 's/a < b/a <= b/' pkg/core.py"
        if self.parse(self.reply(sample)) != Call(sample):
            raise BadInput(
                f"the tokenizer turns a call into {self.decode(self.reply(sample))!r}",
                where=self._where,
                mend="it must give text back unchanged",
            )

    def _rewrites(self, how: str) -> BadInput:
        return BadInput(
            f"the chat template rewrites history: it {how}",
            where=self._where,
            mend="training needs a template whose text only grows from turn to turn",
        )


def _opening(system: str, user: str) -> list[Message]:
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": user}]


def _bare(text: str) -> str:
    """Without blanks, and without the start of thinking at its end."""
    return "".join(_THINKING.sub("", text).split())


def _json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; files that are not there are empty."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read it: {error}", where=str(path)) from None
    if not isinstance(data, dict):
        raise BadInput("it holds no JSON object", where=str(path))
    return data


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or a key of the tokenizer's configuration (one text or several by name)."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("tool_use", named.get("default"))
    return template
