"""What a scripted model says next: a pure function of the conversation.

A script is lines of a user's text; the package's docstring lists them. Which step comes next is told by the results of
tools that came after the text: nothing is remembered. Knows no API.
"""

from __future__ import annotations

import json
import re
import shlex

from crab.model import Struct
from crab.turns.mock import tools
from crab.turns.mock.conversation import DIGITS, Conversation, Said

GREETING = "I am a scripted model; lines of your prompt that begin with `$ ` are the commands that I run."
HELPER = "A scripted session"
"""What requests without tools get: titles, mostly."""
DONE = "done"
FENCE = "```mswea_bash_command"
"""mini-swe-agent without tools: what begins a command in the text of an answer."""
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""mini-swe-agent: a command that prints this ends the run. A text does not, it is asked for a command again."""

_MARK = r"(?P<mark>\$&?|>|~)\s+(?P<rest>\S.*?)\s*$"
_LINE = re.compile(r"\s*" + _MARK)
_BEGUN = re.compile(r"(?:.{0,80}?:\s+)??\s*(?P<quote>[\"'`])?" + _MARK)
"""The first line of a script: a client may have put words before it ("Please solve this issue: …")."""
_NEXT = re.compile(r"\s+;;\s+(?=(?:\$&?|>|~)\s)")
_ASIDE = re.compile(r"<([\w-]*(?:reminder|context|instructions))\b[^>]*>.*?</\1>", re.DOTALL | re.IGNORECASE)
"""What clients add to a user's text on their own."""
_OWN_CALL = re.compile(rf"_([0-9a-f]{{{DIGITS}}})_\d+$")


class Step(Struct, kw_only=True):
    """One answer of a script."""

    commands: tuple[str, ...] = ()
    """Called at once. None: the text is the last one."""
    text: str = ""
    wait: float = 0.0
    """Seconds until the first byte."""


class Plan(Struct, kw_only=True):
    """What is answered."""

    text: str = ""
    """Comes before the calls."""
    calls: tuple[tools.Call, ...] = ()
    wait: float = 0.0
    main: bool = True
    """The request belongs to the agent's main loop."""
    step: int = 0
    line: str = ""
    """The part of the script that is answered; empty without a script."""


def plan(conversation: Conversation) -> Plan:
    """The answer to a conversation."""
    in_text = not conversation.tools and FENCE in _prompts(conversation)
    steps, number = find(conversation.said, in_text)
    if not conversation.tools and not in_text:
        return _helper(conversation, steps)
    if not steps:
        return _last(conversation, Step(text=GREETING), in_text)
    number = min(number, len(steps) - 1)
    step = steps[number]
    if not step.commands:
        answer = _last(conversation, step, in_text)
    elif in_text:
        answer = Plan(text=_fenced(step.text, "\n".join(step.commands)))
    elif (tool := tools.shell(conversation.tools)) is not None:
        answer = Plan(text=step.text, calls=tuple(tools.command(tool, line) for line in step.commands))
    else:
        names = ", ".join(tool.name for tool in conversation.tools)
        answer = _last(conversation, Step(text=f"No tool runs a command among: {names}"), in_text)
    line = " ;; ".join(step.commands) or step.text
    return Plan(text=answer.text, calls=answer.calls, wait=step.wait, step=number, line=line)


def find(said: tuple[Said, ...], in_text: bool = False) -> tuple[tuple[Step, ...], int]:
    """The newest script and how many of its answers have their results; no steps if there is no script.

    `in_text`: results come as texts of the user, after an answer with a command in it.
    """
    steps: tuple[Step, ...] = ()
    groups: set[str] = set()
    model, following = "", False
    for one in said:
        if one.who == "model":
            model, following = one.text, False
        elif one.who == "result" or (in_text and FENCE in model):
            own = _OWN_CALL.search(one.call)
            # Calls of one answer carry its key. Others are told by what the model says between.
            if own:
                groups.add(own[1])
            elif not following:
                groups.add(str(len(groups)))
            following = True
        elif begun := parse(one.text):
            steps, following = begun, False
            groups.clear()
    return steps, len(groups)


def parse(text: str) -> tuple[Step, ...]:
    """The steps of a text; the last one is without commands. None if no line of it belongs to a script."""
    steps: list[Step] = []
    commands: list[str] = []
    texts: list[str] = []
    wait, before = 0.0, ""
    marks = _marks(text)
    for mark, rest in [*marks, ("", "")]:
        if commands and not (mark == before == "$&"):
            steps.append(Step(commands=tuple(commands), text="\n".join(texts), wait=wait))
            commands, texts, wait = [], [], 0.0
        before = mark
        if mark in ("$", "$&"):
            commands.append(rest)
        elif mark == ">":
            texts.append(rest)
        elif mark == "~":
            wait = float(rest)
    if not any(mark for mark, _ in marks):
        return ()
    return (*steps, Step(text="\n".join(texts) or DONE, wait=wait))


def _marks(text: str) -> list[tuple[str, str]]:
    """The lines of a script, as mark and rest; lines between them that are none have an empty mark."""
    found: list[tuple[str, str]] = []
    quote = None
    for line in _bare(text).splitlines():
        for part in _NEXT.split(line):
            match = (_LINE if found else _BEGUN).match(part)
            if match and (match["mark"] != "~" or re.fullmatch(r"\d+(\.\d+)?", match["rest"])):
                quote = quote if found else match["quote"]
                found.append((match["mark"], match["rest"]))
            elif found:
                found.append(("", ""))
    last = max((at for at, (mark, _) in enumerate(found) if mark), default=None)
    if quote and last is not None:
        found[last] = (found[last][0], found[last][1].removesuffix(quote))
    return found


def _bare(text: str) -> str:
    """A user's text without what clients wrap it in: asides, tags, and the quotes that opencode puts around arguments."""
    text = _ASIDE.sub("\n", text)
    for name in re.findall(r"(?m)^\s*<([\w-]+)>", text):
        text = text.replace(f"<{name}>", "\n").replace(f"</{name}>", "\n")
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'`":
        text = text[1:-1].replace('\\"', '"') if text[0] == '"' else text[1:-1]
    return text


def _prompts(conversation: Conversation) -> str:
    return "\n".join([conversation.instructions, *(one.text for one in conversation.said if one.who == "user")])


def _last(conversation: Conversation, step: Step, in_text: bool) -> Plan:
    """The final text, in the way in which the client takes one."""
    ended = f"echo {SUBMIT} && echo {shlex.quote(step.text)}"
    if in_text:
        return Plan(text=_fenced("", ended))
    if (call := tools.finish(conversation.tools, step.text)) is not None:
        return Plan(calls=(call,))
    if SUBMIT in _prompts(conversation) and (tool := tools.shell(conversation.tools)) is not None:
        return Plan(calls=(tools.command(tool, ended),))
    return Plan(text=step.text)


def _helper(conversation: Conversation, steps: tuple[Step, ...]) -> Plan:
    if conversation.shape is not None:
        return Plan(text=json.dumps(tools.value("", {"type": "object"} | conversation.shape)), main=False)
    return Plan(text=steps[0].text if len(steps) == 1 else HELPER, main=False)


def _fenced(text: str, command: str) -> str:
    return f"{text or 'The next step of the script.'}\n\n{FENCE}\n{command}\n```"
