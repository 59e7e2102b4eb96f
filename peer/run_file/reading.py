"""Reading a run file: from TOML, or from the canonical form that other peers serve.

Nothing in a run file is executed, and reading one opens no file and no connection.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec
from blake3 import blake3

from dht.protocol import UPGRADE
from peer.errors import Fault, RunFileError
from peer.quantities import listed
from peer.run_file.contradictions import Contradiction, contradictions, obstacles
from peer.run_file.declaring import Findings, TomlLines, check_table
from peer.run_file.sections import SCHEMA, RunFile

RUN_FILE_MAX_BYTES = 16 * 1024
"""Upper bound on the canonical form, which peers send to each other."""

TEXT_MAX_BYTES = 4 * RUN_FILE_MAX_BYTES
"""Upper bound on a run file as people write it, which comments make twice as long. Both are checked
before anything is parsed."""


_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_DEEP_KEY = re.compile(rf"(?<![\w-])(?:{_PART}[ \t]*+\.[ \t]*+){{32}}")
"""A key of more than 32 parts: ``tomllib`` takes the square of their number,
in time and in memory. 60 KB of them took 4 GB."""


def parse(text: str, *, source: str = "run file") -> RunFile:
    """Read a run file in TOML.

    Raises ``RunFileError``, which lists every fault with its line and the rule it breaks.
    """
    size = len(text.encode())
    if size > TEXT_MAX_BYTES:
        raise RunFileError(source, [_too_large(size, TEXT_MAX_BYTES)])
    if _DEEP_KEY.search(text):
        raise RunFileError(source, [Fault("", "it is nested too deeply")])
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RunFileError(source, [_syntax_fault(text, error)]) from error
    except RecursionError as error:
        raise RunFileError(source, [Fault("", "it is nested too deeply")]) from error
    return _checked(settings, source=source, lines=TomlLines(text))


REQUIRED = ("name", "model.recipe", "data.recipe", "end.tokens")
"""Settings that every run file sets, the last of them in its last section, though each has a
default: a file that was cut off would found another run than its author meant."""


def parse_whole(text: str, *, source: str = "run file") -> RunFile:
    """Read a whole run file, as people pass them on. Raises what ``parse`` raises."""
    run = parse(text, source=source)
    table = tomllib.loads(text)
    missing = []
    for name in REQUIRED:
        section, _, setting = name.rpartition(".")
        if setting not in (table.get(section, {}) if section else table):
            missing.append(name)
    if missing:
        problem = (
            f"it does not set {listed(missing)}, which every run file sets: it is empty or was cut "
            "off; `shoal run new` writes a whole one"
        )
        raise RunFileError(source, [Fault(missing[0], problem)])
    return run


def from_canonical(data: bytes, run_id: str, *, source: str = "run file from peers") -> RunFile:
    """Read the output of ``RunFile.canonical`` as served by an untrusted peer.

    The bytes must hash to ``run_id``. Raises ``RunFileError``.
    """
    if len(data) > RUN_FILE_MAX_BYTES:
        raise RunFileError(source, [_too_large(len(data))])
    own_id = blake3(data).hexdigest()
    if own_id != run_id:
        raise RunFileError(source, [Fault("", f"its id is {own_id}, the id asked for is {run_id}")])
    try:
        settings = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunFileError(source, [Fault("", f"it is not JSON: {error}")]) from error
    if not isinstance(settings, dict):
        raise RunFileError(source, [Fault("", "it is not a JSON object")])
    try:
        run = _checked(settings, source=source, lines=None)
    except RunFileError as error:
        raise RunFileError(source, [_perhaps_later(fault) for fault in error.faults]) from None
    if run.canonical() != data:
        raise RunFileError(source, [Fault("", "it is not in canonical form")])
    return run


def _perhaps_later(fault: Fault) -> Fault:
    """A fault of a file that was checked by the release that made it: it may be a later one."""
    if fault.setting == "schema":  # says so itself
        return fault
    advice = f"a later release may have made the run: upgrade this side with {UPGRADE}"
    return replace(fault, problem=f"{fault.problem}; {advice}", nearest=None)


def with_settings(
    run: RunFile, settings: Mapping[str, Any], *, source: str = "amendment"
) -> RunFile:
    """The run with some settings changed, named as ``inner.learning_rate``.

    Raises ``RunFileError`` for a setting that breaks a rule. The run's id follows from its file: it
    is not that of the result.
    """
    plain = msgspec.json.decode(run.canonical())
    for name, value in settings.items():
        section, _, setting = name.partition(".")
        if not isinstance(plain.get(section), dict):
            problem = f"{name} is not a setting: there is no section {section}"
            raise RunFileError(source, [Fault(name, problem)])
        plain[section][setting] = value
    changed = _checked(plain, source=source, lines=None)
    return msgspec.structs.replace(changed, seeds=run.seeds)


def wrong_values(settings: Mapping[str, Any]) -> list[Fault]:
    """The faults of single settings, such as ``inner.learning_rate``, whatever the others are."""
    table: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, setting = name.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[setting] = value
    findings = Findings(None)
    check_table(table, RunFile, (), findings)
    return [fault for fault in findings.faults if fault.setting in settings]


def faults_of_new(run: RunFile, *, now: datetime, text: str | None = None) -> list[Fault]:
    """The faults of a run that is still to begin, by ``obstacles``. ``text``: its TOML."""
    findings = Findings(None if text is None else TomlLines(text))
    return _by_line(findings, obstacles(run, now=now))


def _too_large(size: int, most: int = RUN_FILE_MAX_BYTES) -> Fault:
    return Fault("", f"it has {size} bytes; a run file has at most {most}")


def _syntax_fault(text: str, error: tomllib.TOMLDecodeError) -> Fault:
    # "... (at line 2, column 11)", or "... (at end of document)"
    head, _, place = str(error).rpartition(" (at ")
    number = place.removeprefix("line ").split(",")[0]
    line = int(number) if number.isdigit() else text.count("\n") + 1
    written = (text.split("\n")[line - 1 : line] or [""])[0]
    name, _, value = (part.strip() for part in written.partition("="))
    if head == "Cannot overwrite a value":
        return Fault(name, f"{name} is set twice", line=line)
    if head == "Invalid value":
        head = f"{value!r} is no value: a text needs quotes, and a switch is true or false"
    return Fault("", f"it is not TOML: {head}", line=line)


def _checked(settings: dict[str, Any], *, source: str, lines: TomlLines | None) -> RunFile:
    """The run file with these settings. Raises ``RunFileError`` with every fault found."""
    schema = settings.get("schema", SCHEMA)
    if schema != SCHEMA:
        # Reported alone: the rules below are those of this schema.
        line = lines.of(("schema",)) if lines else None
        later = isinstance(schema, int) and schema > SCHEMA
        side = f"this side is too old: upgrade it with {UPGRADE}" if later else "it is no schema"
        problem = f"schema is {schema!r}; this version of shoal reads {SCHEMA}: {side}"
        raise RunFileError(source, [Fault("schema", problem, line)])
    findings = Findings(lines)
    check_table(settings, RunFile, (), findings)
    if not findings.faults:
        try:
            run = msgspec.convert(settings, RunFile)
        except msgspec.ValidationError as error:  # a rule that check_table does not know
            raise RunFileError(source, [Fault("", str(error))]) from None
        if faults := _by_line(findings, contradictions(run)):
            raise RunFileError(source, faults)
        if (size := len(run.canonical())) > RUN_FILE_MAX_BYTES:
            raise RunFileError(source, [_too_large(size)])
        return run
    raise RunFileError(source, _by_line(findings))


def _by_line(found: Findings, problems: Iterable[Contradiction] = ()) -> list[Fault]:
    for setting, problem in problems:
        found.add(tuple(setting.split(".")), problem)
    return sorted(found.faults, key=lambda fault: fault.line or 0)
