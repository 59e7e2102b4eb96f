"""``python -m docs.site.reference`` writes the pages of the reference that are made of the code.

They are the run file, the commands, the Python names and the events.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import peer
from docs.site.event_fields import TYPES, fields_of
from peer import cli
from peer.events.table import COMMON, OPENED, TABLE, Audience, Event
from peer.status import FIGURES
from peer.trainer.session import Run
from peer.trainer.settings import JoinSettings

FOLDER = Path(__file__).parents[1] / "reference"
GENERATED = "Generated from the code by `python -m docs.site.reference`."


def plain(text: str) -> str:
    """A docstring as one paragraph of Markdown, fit for a cell of a table."""
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def run_file() -> str:
    """Every setting of a run file, as ``shoal run new --all`` writes it."""
    with redirect_stdout(StringIO()) as written:
        assert cli.run(["run", "new", "--all"]) == 0
    return (
        "# The run file\n\n"
        f"{GENERATED} `shoal run new my.run.toml --all` writes the same.\n\n"
        "A setting that is left out has the value shown. Lines that begin with `#` and a setting\n"
        "show settings that are unset by default, and those of other recipes.\n\n"
        f"```toml\n{written.getvalue().strip()}\n```\n"
    )


def commands() -> str:
    """Every command with its arguments and options."""
    parts = ["# Commands", "", f"{GENERATED} `shoal COMMAND --help` says the same."]
    for name, command in sorted(_leaves(cli.command(), "shoal")):
        text, _, example = inspect.cleandoc(command.help or "").partition("\nExample: ")
        parts += ["", f"## {name}", "", *_paragraphs(text)]
        if example:
            parts += ["", "```text", " ".join(example.split()), "```"]
        rows = [row for parameter in command.params for row in _parameter(parameter)]
        if rows:
            parts += ["", "| option | meaning |", "|---|---|", *rows]
    return "\n".join([*parts, ""])


def _paragraphs(text: str) -> Iterator[str]:
    for index, paragraph in enumerate(text.strip().split("\n\n")):
        yield from [""] * (index > 0)
        yield from textwrap.wrap(" ".join(paragraph.split()), 118, break_long_words=False)


def _leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    for word, child in getattr(command, "commands", {}).items():
        if getattr(child, "commands", None):
            yield from _leaves(child, f"{name} {word}")
        else:
            yield f"{name} {word}", child


def _parameter(parameter: Any) -> Iterator[str]:
    if parameter.name == "help" or getattr(parameter, "hidden", False):
        return
    options = [name for name in parameter.opts if name.startswith("-")]
    named = options or [parameter.metavar or parameter.name.upper()]
    shown = ", ".join(f"`{name}`" for name in named).replace("|", " or ")
    yield f"| {shown} | {plain(getattr(parameter, 'help', None) or '')} |"


def api() -> str:
    """The names that ``peer`` exports, the keywords of ``peer.join`` and the parts of a run."""
    parts = ["# Python", "", GENERATED, "", "## Names of `peer`", ""]
    parts += ["| name | meaning |", "|---|---|"]
    for name in sorted(peer.__all__):
        parts.append(f"| `{name}` | {_first(getattr(peer, name))} |")
    parts += ["| `peer.hf.ShoalCallback` | A callback of transformers' Trainer |"]
    parts += ["| `peer.lightning.ShoalCallback` | A callback of Lightning |"]
    parts += ["| `peer.island.join` | `join` for all processes that torchrun starts |"]
    parts += [
        "",
        "## Keywords of `peer.join`",
        "",
        "| keyword | default | meaning |",
        "|---|---|---|",
    ]
    for parameter in inspect.signature(peer.join).parameters.values():
        if parameter.name not in ("run", "own"):
            shown = "" if parameter.default is parameter.empty else f"`{parameter.default}`"
            parts.append(f"| `{parameter.name}` | {shown} | {JOIN[parameter.name]} |")
    texts = JOIN | _texts_of_fields(JoinSettings)
    for field in sorted(fields(JoinSettings), key=lambda field: field.name):
        default = field.default
        if field.name in INTERNAL:
            continue
        shown = f"`{default}`" if isinstance(default, str | int | float | tuple | None) else ""
        parts.append(f"| `{field.name}` | {shown} | {plain(texts.get(field.name, ''))} |")
    parts += ["", "## A run", "", inspect.getdoc(Run) or "", ""]
    parts += ["| name | meaning |", "|---|---|"]
    for name, member in inspect.getmembers(Run):
        if not name.startswith("_"):
            called = "" if isinstance(member, property) else "()"
            parts.append(f"| `run.{name}{called}` | {_first(member)} |")
    parts += ["", "## `run.status`", "", FIGURES_TEXT, ""]
    parts += ["| name | unit | metric | meaning |", "|---|---|---|---|"]
    for name, figure in FIGURES.items():
        family, label = figure.family(name), f"{{{figure.label}}}" if figure.label else ""
        metric = f"`{family}{'_total' if figure.counts else ''}{label}`" if family else ""
        parts.append(f"| `{name}` | {figure.unit} | {metric} | {figure.text} |")
    return "\n".join([*parts, ""])


FIGURES_TEXT = (
    "All figures of this peer. The records `progress` and `done` of `--json`, `state.json` of its "
    "page and\n`shoal status --json` have them by these names, the curves those that are one "
    "number, and `/metrics`\nthe numbers by the names of their metrics."
)

JOIN = {
    "model": "The model, wrapped or not; several networks as one `ModuleDict`",
    "optimizer": "Its optimizer, or a list of them; `None` with `auto=False`",
    "auto": "False: the loop calls `run.step()` itself",
    "settings": "All keywords below as one `JoinSettings`",
    "announce": "Addresses to tell others, instead of those that the machine finds",
    "line": "When an agent that is silent is replaced: a `LineSettings`",
    "listen": "Addresses to listen at",
}
"""What no docstring of one keyword says."""

INTERNAL = {"agent_command", "started_at"}
"""Keywords for programs of Shoal itself."""


def _first(thing: Any) -> str:
    return plain((inspect.getdoc(thing) or "").split("\n\n")[0])


def _texts_of_fields(kind: type) -> dict[str, str]:
    """The strings below the fields of a class and of those that it extends."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = re.sub(r"\s+", " ", ast.literal_eval(text.value))
    return found


TITLES = (
    (Audience.LOG, "Event log", "In `events.jsonl` of learners and keepers."),
    (
        Audience.RUN | Audience.SCREEN,
        "Training process only",
        "For `run.on` and `--json`, not in the event log: the agent, which writes it, is not there "
        "yet when most of them happen, or no longer, as for `compiler_awaited`.",
    ),
    (Audience.LAB, "Experiments", "Records that `shoal simulate` writes."),
)

AUDIENCES = {
    Audience.LOG: ("log", "appended to `events.jsonl`"),
    Audience.RUN: ("run", "passed to handlers of `run.on`; a line of `--json`"),
    Audience.SCREEN: ("screen", "like `run`, and its sentence is shown while `shoal` runs"),
    Audience.ROUND: ("explain round", "in `shoal explain --round`"),
    Audience.PEER: (
        "explain peer",
        "in `shoal explain --peer` and on the page",
    ),
    Audience.NAMED: (
        "explain named",
        "in `shoal explain --peer` for the peer in `peer`",
    ),
    Audience.TROUBLE: ("explain summary", "counted in the summary of `shoal explain`"),
    Audience.METRICS: ("metrics", "figures and curves of the page are taken from it"),
    Audience.LAB: ("lab", "a record of `shoal simulate`"),
}


def events() -> str:
    """Every event with its fields, its sentence and who gets it."""
    return "\n".join(_lines_of_events()) + "\n"


def _lines_of_events() -> Iterator[str]:
    common = ", ".join(f"`{name}` ({TYPES.get(name, 'text')})" for name in COMMON)
    yield "# Events"
    yield ""
    yield GENERATED
    yield ""
    yield "Learners and keepers append events to `events.jsonl` in their folder: one JSON object in"
    yield f"each line, with {common} and the fields below. An event that is emitted"
    yield "in several places may lack some of its fields there. The first line of a file is"
    yield f"`{OPENED}`. Events and fields are added, never changed."
    yield ""
    yield "A sentence leaves out its subject, which is the peer that the event happened to. An"
    yield "event without a sentence is told by its `text`, or else by its name and its fields."
    yield "`shoal explain LOG...` reads the logs of several peers as one timeline."
    yield ""
    yield "| audience | meaning |"
    yield "|---|---|"
    for name, meaning in AUDIENCES.values():
        yield f"| {name} | {meaning} |"
    listed: set[str] = set()
    for audience, title, text in TITLES:
        yield ""
        yield f"## {title}"
        yield ""
        yield text
        yield ""
        yield "| event | fields | sentence | audience |"
        yield "|---|---|---|---|"
        for _, row in sorted(TABLE.items()):
            if row.audience & audience and row.name not in listed:
                listed.add(row.name)
                yield _row_of_event(row)


def _row_of_event(row: Event) -> str:
    fields = ", ".join(f"`{name}`: {kind}" for name, kind in fields_of(row.name).items())
    sentence = row.sentence or ""
    if not isinstance(sentence, str):
        sentence = (sentence.__doc__ or "").replace("``", "`")
    audience = ", ".join(name for each, (name, _) in AUDIENCES.items() if row.audience & each)
    return f"| `{row.name}` | {fields} | {sentence} | {audience} |"


PAGES = {"run-file": run_file, "commands": commands, "api": api, "events": events}


def main() -> None:
    for name, page in PAGES.items():
        (FOLDER / f"{name}.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
