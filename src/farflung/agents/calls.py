"""How a model writes a call of the one tool, bash: four written forms, read strictly."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

ToolFormat = Literal["command", "hermes", "xml", "fenced"]
Reason = Literal["empty", "text", "malformed", "cut"]


@dataclass(frozen=True, slots=True)
class Call:
    """The reply asks for this command."""

    command: str


@dataclass(frozen=True, slots=True)
class NoCall:
    """The reply holds no usable call: nothing at all, text only, a call that cannot be read, or an end before the call's."""

    reason: Reason


BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command with bash in the working tree and read what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command to run."}},
            "required": ["command"],
        },
    },
}

_WHOLE: dict[ToolFormat, re.Pattern[str]] = {
    "command": re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL),
    "hermes": re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL),
    "xml": re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL),
    "fenced": re.compile(r"^```(?:bash|sh)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE),
}
_OPENS: dict[ToolFormat, str] = {
    "command": "<tool_call>",
    "hermes": "<tool_call>",
    "xml": "<tool_call>",
    "fenced": "```",
}
_XML_BODY = re.compile(r"\s*<function=bash>\s*<parameter=command>\n?(.*?)\n?</parameter>\s*</function>\s*", re.DOTALL)


def detect(template: str) -> ToolFormat:
    """The form that a chat template teaches; templates that know no tools get fenced blocks."""
    if "<function=" in template:
        return "xml"
    if "<tool_call>" in template:
        return "hermes" if "tojson" in template or '"arguments"' in template else "command"
    return "fenced"


def write(command: str, form: ToolFormat) -> str:
    """A call of ``command`` as a model would write it."""
    if form == "command":
        return f"<tool_call>{command}</tool_call>"
    if form == "hermes":
        call = json.dumps({"name": "bash", "arguments": {"command": command}}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"
    if form == "xml":
        return f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"
    return f"```bash\n{command}\n```"


def read(text: str, form: ToolFormat, *, ended: bool) -> Call | NoCall:
    """Find the one call in a reply. ``ended``: the model ended the reply itself (it was not cut at the token limit).

    Thinking that was closed is passed over. A call inside thinking that was never closed counts: models that forget the
    closing tag still mean the call. A complete call counts even where the reply was cut after it.
    """
    text = text.rpartition("</think>")[2]
    found = _WHOLE[form].findall(text)
    if len(found) == 1 and (command := _command(found[0], form)) is not None:
        return Call(command)
    if found:
        return NoCall("malformed")
    if not ended:
        return NoCall("cut")
    if _OPENS[form] in text:
        return NoCall("malformed")
    return NoCall("text" if text.removeprefix("<think>").strip() else "empty")


def _command(body: str, form: ToolFormat) -> str | None:
    """The command in a call's body, None if there is none that a shell could be given."""
    command: Any = body
    if form == "hermes":
        try:
            call = json.loads(body)
            arguments = call["arguments"] if call["name"] == "bash" else {}
            command = (json.loads(arguments) if isinstance(arguments, str) else arguments)["command"]
        except (ValueError, KeyError, TypeError):
            return None
    elif form == "xml":
        match = _XML_BODY.fullmatch(body)
        command = match[1] if match else None
    elif form == "fenced":
        command = body.removesuffix("\n")
    usable = isinstance(command, str) and command.strip() != "" and "\0" not in command and _encodable(command)
    return command if usable else None


def _encodable(text: str) -> bool:
    """JSON can smuggle in lone surrogates, which no shell can be given."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
