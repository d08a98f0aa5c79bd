from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.dialects import CHATML, COMMAND, HERMES, MOVES_TOOLS, TEMPLATES, dialect, save, tokenizer
from farflung.agents.calls import BASH_TOOL, Call, NoCall, write
from farflung.agents.dialect import Dialect
from farflung.core.errors import BadInput

DIALECTS = {name: dialect(name) for name in TEMPLATES}
FORMS = {"command": "command", "fenced": "fenced", "hermes": "hermes", "thinking": "hermes", "xml": "xml"}
every = pytest.mark.parametrize("name", TEMPLATES)


def reference(name: str, messages: list[dict[str, object]], *, reply_next: bool) -> list[int]:
    """What transformers makes of the whole conversation at once."""
    from transformers import PreTrainedTokenizerFast

    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=TEMPLATES[name])
    tools = None if FORMS[name] == "fenced" or "tools" not in TEMPLATES[name] else [BASH_TOOL]
    text = whole.apply_chat_template(messages, tools=tools, add_generation_prompt=reply_next, tokenize=False)
    return list(whole.encode(text, add_special_tokens=False))


@every
def test_the_form_is_read_off_the_template(name: str) -> None:
    assert DIALECTS[name].tool_format == FORMS[name]


@every
def test_the_opening_is_what_the_template_says(name: str) -> None:
    messages = [{"role": "system", "content": "Work."}, {"role": "user", "content": "f is wrong.\n"}]
    assert DIALECTS[name].opening("Work.", "f is wrong.\n").tolist() == reference(name, messages, reply_next=True)


@pytest.mark.parametrize("name", ["command", "fenced", "hermes", "xml"])
def test_a_grown_transcript_equals_the_conversation_tokenised_at_once(name: str) -> None:
    d = DIALECTS[name]
    output = "     1\tdef f(a, b):\n     2\t    return a - b\n"
    result_role = "user" if name == "fenced" else "tool"
    ids = d.opening("", "f is wrong.")
    messages: list[dict[str, object]] = [{"role": "user", "content": "f is wrong."}]
    for turn in range(3):
        reply = d.reply(f"cat -n f{turn}.py")
        ids = np.concatenate([ids, reply])
        ids = np.concatenate([ids, d.observation(output, ids)])
        messages += [
            {"role": "assistant", "content": write(f"cat -n f{turn}.py", d.tool_format)},
            {"role": result_role, "name": "bash", "content": output},
        ]
    assert ids.tolist() == reference(name, messages, reply_next=True)
    assert ids.dtype == np.int32


def test_thinking_stays_as_it_was_sampled_and_later_turns_match_the_template_without_it() -> None:
    d = DIALECTS["thinking"]
    opening = d.opening("", "f is wrong.")
    assert d.decode(opening).endswith("<|im_start|>assistant\n<think>\n")
    thought = np.concatenate([d._encode("I look.\n</think>\n\n"), d.reply("ls")])
    assert d.parse(thought) == Call("ls")
    suffix = d.observation("core.py", thought)
    assert d.decode(suffix) == (
        "\n<|im_start|>user\n<tool_response>\ncore.py\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    correction = d.decode(d.correction("text", thought))
    assert correction.startswith("\n<|im_start|>user\nThe reply had no call.")


@every
def test_a_cut_reply_is_given_its_end(name: str) -> None:
    d = DIALECTS[name]
    whole = d.reply("ls")
    end = whole[-1:]
    assert end[0] == d.stop_ids[0]
    after_whole, after_cut = d.observation("x", whole), d.observation("x", whole[:-1])
    assert after_cut.tolist() == [*end.tolist(), *after_whole.tolist()]
    other_stop = np.append(whole[:-1], tokenizer().token_to_id("<|endoftext|>")).astype(np.int32)
    assert d.parse(other_stop) == Call("ls")
    assert d.observation("x", other_stop).tolist() == after_cut.tolist()


def test_after_the_end_token_comes_the_newline_of_the_template() -> None:
    assert DIALECTS["fenced"].decode(DIALECTS["fenced"].observation("x", DIALECTS["fenced"].reply("ls"))) == (
        "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )


@every
@settings(max_examples=40, deadline=None)
@given(
    text=st.lists(
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
            st.sampled_from(["<|im_end|>", "</tool_call>", "<|im_start|>assistant\n", "</tool_response>", "<|im_", "end|>", "<|end|>"]),
        ),
        max_size=6,
    ).map("".join)
)  # fmt: skip
def test_text_from_outside_never_becomes_control_tokens(name: str, text: str) -> None:
    d = DIALECTS[name]
    added = set(tokenizer().get_added_tokens_decoder())
    reply = d.reply("ls")
    kept = d.observation(text, reply)
    empty = d.observation("", reply)
    assert [i for i in kept.tolist() if i in added] == [i for i in empty.tolist() if i in added]
    assert text.replace("\U000f0b4b", "") in d.decode(kept)
    opening = d.opening("", text)
    assert [i for i in opening.tolist() if i in added] == [i for i in d.opening("", "").tolist() if i in added]


@every
@settings(max_examples=40, deadline=None)
@given(command=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), min_size=1, max_size=30))
def test_a_written_call_is_read_back(name: str, command: str) -> None:
    d = DIALECTS[name]
    if not command.strip() or any(tag in command for tag in ("</", "```")):
        return
    if name == "xml":
        command = command.strip("\n") or "ls"
    if name == "fenced":
        command = command.rstrip("\n") or "ls"
    command = command.replace("\U000f0b4b", "x")
    assert d.parse(d.reply(command)) == Call(command)
    assert d.parse(d.reply(command)[:-1]) == Call(command)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("command", "", "empty"),
        ("command", " \n", "empty"),
        ("command", "I am done.", "text"),
        ("command", "<tool_call> </tool_call>", "malformed"),
        ("command", "<tool_call>ls", "malformed"),
        ("command", "<tool_call>ls</tool_call><tool_call>pwd</tool_call>", "malformed"),
        ("command", "<tool_call>a\0b</tool_call>", "malformed"),
        ("hermes", "<tool_call>ls</tool_call>", "malformed"),
        ("hermes", '<tool_call>{"name": "python", "arguments": {"command": "ls"}}</tool_call>', "malformed"),
        ("hermes", '<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}}</tool_call>', "malformed"),
        ("hermes", '<tool_call>{"name": "bash", "arguments": {"command": 3}}</tool_call>', "malformed"),
        ("hermes", '<tool_call>{"name": "bash", "arguments": {"command": "\\ud800"}}</tool_call>', "malformed"),
        ("hermes", "<tool_call>[1]</tool_call>", "malformed"),
        ("thinking", "<think>\nI would call <tool_call>x</tool_call>\n</think>\n\n", "empty"),
        ("thinking", "<think>\n", "empty"),
        ("thinking", "<think>\nHm.\n</think>\n\nDone.", "text"),
        ("xml", "<tool_call>\n<function=python>\n</function>\n</tool_call>", "malformed"),
        ("fenced", "Try this:\n```python\nprint()\n```", "malformed"),
        ("fenced", "Just run ls.", "text"),
    ],
)
def test_replies_without_a_call_say_why(name: str, text: str, reason: str) -> None:
    d = DIALECTS[name]
    ids = d._encode(text + d._end)
    assert d.parse(ids) == NoCall(reason)  # type: ignore[arg-type]


@every
def test_a_reply_cut_in_its_call_is_cut(name: str) -> None:
    d = DIALECTS[name]
    assert d.parse(d.reply("cat core.py")[:-5]) == NoCall("cut")
    assert d.parse(np.zeros(0, np.int32)) == NoCall("cut")


def test_forms_that_models_really_write() -> None:
    hermes, fenced, xml = DIALECTS["hermes"], DIALECTS["fenced"], DIALECTS["xml"]
    as_string = '<tool_call>{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>'
    assert hermes.parse(hermes._encode(as_string + hermes._end)) == Call("ls")
    unclosed = "<think>\nI look.\n" + write("ls -a", "hermes")
    assert hermes.parse(hermes._encode(unclosed + hermes._end)) == Call("ls -a")
    talk = "First look:\n```sh\ncat a.py\ncat b.py\n```\nThen I edit."
    assert fenced.parse(fenced._encode(talk + fenced._end)) == Call("cat a.py\ncat b.py")
    inline = (
        "<tool_call>\n<function=bash>\n<parameter=command>\nsed -i 's/a/b/' x\n</parameter>\n</function>\n</tool_call>"
    )
    assert xml.parse(xml._encode(inline + xml._end)) == Call("sed -i 's/a/b/' x")


def test_a_model_without_a_template_is_refused(tmp_path) -> None:
    with pytest.raises(BadInput, match="no chat template") as error:
        Dialect.load(save(tmp_path / "base", template=None))
    assert str(tmp_path / "base") in str(error.value)


def test_templates_that_rewrite_history_are_refused(tmp_path) -> None:
    with pytest.raises(BadInput, match="rewrites history"):
        Dialect.load(save(tmp_path, MOVES_TOOLS))
    forgetful = CHATML.replace("messages %}", "messages[-3:] %}")
    with pytest.raises(BadInput, match="rewrites history"):
        Dialect.load(save(tmp_path, forgetful))
    with pytest.raises(BadInput, match=r"cannot render the messages .*: only users"):
        Dialect.load(save(tmp_path, "{{ raise_exception('only users') }}"))
    with pytest.raises(BadInput, match="token of its own"):
        Dialect.load(save(tmp_path, CHATML.replace("<|im_end|>", "[end]")))


def test_templates_may_leave_a_newline_out_at_the_end_and_end_turns_with_several_tokens() -> None:
    last = (
        "{%- if loop.last %}{{- '<|im_end|>' }}{%- else %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}"
    )
    template = HERMES.replace(HERMES[HERMES.rindex("{%- if loop.last or") : HERMES.index("{%- if add_gen")], last)
    d = Dialect(tokenizer(), template, {})
    observed = d.decode(d.observation("x", d.reply("ls")))
    assert observed == "\n<|im_start|>user\n<tool_response>\nx\n</tool_response><|im_end|><|im_start|>assistant\n"

    doubled = CHATML.replace("'<|im_end|>'", "'<|end|><|im_end|>'")
    assert Dialect(tokenizer(), doubled, {}).stop_ids == (tokenizer().token_to_id("<|end|>"),)
    real_stop = tokenizer().token_to_id("<|im_end|>")
    assert Dialect(tokenizer(), doubled, {}, stop_ids=[real_stop]).stop_ids == (real_stop,)


def test_a_folder_is_read_as_transformers_writes_it(tmp_path) -> None:
    from transformers import AutoTokenizer

    folder = save(tmp_path / "first", HERMES)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "second")
    (tmp_path / "second" / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 260]}))
    d = Dialect.load(tmp_path / "second")
    assert d.tool_format == "hermes"
    assert d.opening("S", "U").tolist() == DIALECTS["hermes"].opening("S", "U").tolist()
    assert d.stop_ids == (*DIALECTS["hermes"].stop_ids, 3)

    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": COMMAND}]
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Dialect.load(folder).tool_format == "command"
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(BadInput, match="cannot read it"):
        Dialect.load(folder)
    with pytest.raises(BadInput, match=r"tokenizer\.json"):
        Dialect.load(tmp_path / "nowhere")


def test_a_tokenizer_that_changes_text_is_refused() -> None:
    lossy = tokenizer()
    lossy.decoder = None  # joins tokens with blanks
    with pytest.raises(BadInput, match="give text back unchanged"):
        Dialect(lossy, COMMAND, {})


def test_no_torch_is_loaded() -> None:
    code = "import sys, farflung.agents.dialect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
