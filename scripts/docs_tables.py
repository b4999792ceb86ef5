"""Tables of the documentation generated from the code: commands, recipe keys, names of metrics, formats."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from scalerl.kinds import hints_of

README = Path(__file__).parent.parent / "README.md"
MEANINGS = {
    "pass_rate": "pass rate, held out",
    "eval_reward": "reward, held out",
    "reward_parts": "reward of each function, held out",
    "spreads": "spread of these rewards",
    "set_seconds": "seconds of an evaluation on one of several sets",
    "train_reward": "reward of training, where nothing is held out",
    "step_seconds": "seconds of a step",
    "row_seconds": "seconds since the row before",
    "evaluation_seconds": "of those, seconds of evaluations",
    "devices": "number of devices",
    "tokens": "tokens of a step",
    "tokens_so_far": "tokens since the start",
    "tokens_processed_so_far": "tokens generated plus tokens trained since the start",
    "flops_so_far": "FLOPs since the start",
    "gpu_hours_so_far": "GPU-hours since the start",
    "samples": "completions of a step",
    "samples_so_far": "completions since the start",
    "n_prompts": "prompts of an evaluation",
    "n_samples": "completions per prompt of an evaluation",
    "mean_p_1mp": "mean of p (1 - p) over its prompts",
    "truncated": "share of truncated completions",
    "finished": "1 - share of truncated completions",
    "entropy": "entropy",
    "ratio_clipped": "share of clipped ratios",
    "staleness_mean": "staleness",
    "mean_length": "mean length of completions",
    "kl": "KL to the reference",
    "grad_norm": "gradient norm",
    "loss": "loss",
    "lr": "learning rate",
}
"""What the pages call each role of a vocabulary."""


def cell(text: str) -> str:
    """Return text as a table cell, bars escaped except in code, where MkDocs needs no escape."""
    parts = re.split(r"(`[^`]*`)", re.sub(r"\s+", " ", text).strip())
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in parts)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *(map(cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(names: Iterable[str]) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def metrics(trainer: str) -> str:
    """Return the table of which metric is read for what in one trainer's logs."""
    from scalerl.ingest.vocabularies import BY_TRAINER

    vocabulary = BY_TRAINER[trainer]
    rows = [
        (meaning, code(getattr(vocabulary, role)))
        for role, meaning in MEANINGS.items()
        if getattr(vocabulary, role)
    ]
    for role, meaning in (
        ("device_sums", "devices, of the config"),
        ("sample_sums", "completions of a step, of the config"),
    ):
        rows += [(meaning, f"`{keys}`") for keys in getattr(vocabulary, role)]
    return table(["what", "metric: of several the first that is there"], rows)


def all_metrics() -> str:
    """Return the metrics table of every trainer, each with how the trainer is recognised."""
    from scalerl.ingest.vocabularies import VOCABULARIES

    parts = []
    for one in VOCABULARIES:
        told = f"Recognised by any of {code(one.signs)}." if one.signs else "Where nothing tells the trainer."
        parts.append(f"## {one.trainer}\n\n{told}\n\n{metrics(one.trainer)}")
    return "\n\n".join(parts)


def formats() -> str:
    """Return the table of recognised formats, in the order in which they are tried."""
    from scalerl.ingest.formats.recognise import formats as all_formats

    return table(["`--format`", "what"], [(f"`{one.name}`", one.what) for one in all_formats()])


def commands() -> str:
    """Return a section for every command with its arguments, taken from the parser."""
    from scalerl.cli.main import _parser

    return "\n\n".join(_commands(_parser()))


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                yield _command(sub, helps.get(name, ""))
                yield from _commands(sub)


def _command(parser: argparse.ArgumentParser, what: str) -> str:
    actions = [a for a in parser._actions if a.help != argparse.SUPPRESS and a.dest != "help"]
    usage = " ".join(filter(None, [parser.prog, *map(_in_usage, actions)]))
    rows = [(_named(a), a.help or "") for a in actions if not isinstance(a, argparse._SubParsersAction)]
    lines = textwrap.wrap(
        usage, 100, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )
    shown = "\n".join(f"    {line}" for line in lines)
    return f"## {parser.prog}\n\n{_sentence(what)}\n\n{shown}\n\n{table(['argument', 'meaning'], rows)}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    choices = None if action.choices is None else "|".join(map(str, action.choices))
    name = action.metavar or choices or action.dest.upper()
    name = name if isinstance(name, str) else " ".join(name)
    return f"{name} ..." if action.nargs in ("+", "*") else name


def _in_usage(action: argparse.Action) -> str:
    if isinstance(action, argparse._SubParsersAction):
        return "COMMAND ..."
    if not action.option_strings:
        value = _value(action)
        return f"[{value}]" if action.nargs in ("?", "*") else value
    text = f"{action.option_strings[-1]} {_value(action)}".strip()
    return text if action.required else f"[{text}]"


def _named(action: argparse.Action) -> str:
    return code([f"{name} {_value(action)}".strip() for name in action.option_strings or [""]])


def recipe() -> str:
    """Return a table of all recipe keys with default and meaning, and a section for each choice of kinds."""
    from scalerl.rl.config.recipe import Recipe

    rows, parts = [], []
    said = _said(Recipe)
    for item, hint in _fields(Recipe):
        variants = _variants(hint)
        if not variants:
            rows.append((f"`{item.name}`", _default(item), _meaning(item, hint, said)))
            continue
        kinds = [kind for one in variants if (kind := _kind(one))]
        rows.append((f"[`[{item.name}]`](#{item.name})", _chosen(item), code(kinds)))
        parts.append(f"## {item.name}\n\n" + "\n\n".join(_variant(one, item) for one in variants))
    return "\n\n".join([table(["key", "default", "meaning, or the kinds there are"], rows), *parts])


def _variant(cls: type, item: Field[Any]) -> str:
    """Return the description of one kind of a choice, and the table of its keys."""
    kind = _kind(cls)
    title = f'**`kind = "{kind}"`** ' if kind else ""
    head = f"{title}{_prose(inspect.getdoc(cls) or '')}"
    rows = list(_rows(cls, item.name))
    return f"{head}\n\n{table(['key', 'default', 'meaning'], rows)}" if rows else head


def _rows(cls: type, prefix: str, of: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the keys of a class and of its nested tables; `of` says which kind they belong to."""
    said = _said(cls)
    for item, hint in _fields(cls):
        key = f"{prefix}.{item.name}"
        inner = _variants(hint)
        if item.name != "kind":
            kinds = code(filter(None, map(_kind, inner)))
            yield f"`{key}`", _default(item), " ".join(filter(None, [of, _meaning(item, hint, said), kinds]))
        for one in inner:
            yield from _rows(one, key, f'of `kind = "{_kind(one)}"`:' if _kind(one) else "")


def _meaning(item: Field[Any], hint: Any, said: dict[str, str]) -> str:
    """Return the string below a field, preceded by the words it may be if it is a Literal."""
    words = code(get_args(hint)) if get_origin(hint) is Literal else ""
    return ". ".join(filter(None, [words, said.get(item.name, "")]))


def _prose(doc: str) -> str:
    """Return a docstring, up to its "Args:", as Markdown; indented lines are equations."""
    text = doc.partition("Args:")[0].strip()
    return re.sub(
        r"(?:^ {2,}\S.*(?:\n|\Z))+",
        lambda found: f"\n```text\n{textwrap.dedent(found[0]).rstrip()}\n```\n\n",
        text,
        flags=re.MULTILINE,
    )


def _fields(cls: type) -> Iterator[tuple[Field[Any], Any]]:
    hints = hints_of(cls)
    return ((item, hints[item.name]) for item in fields(cls) if item.init and not item.name.startswith("_"))


def _variants(hint: Any) -> list[Any]:
    """Return the dataclasses that a type hint allows."""
    found = [hint] if is_dataclass(hint) else []
    return found + [one for part in get_args(hint) for one in _variants(part)]


def _kind(cls: Any) -> str:
    return next((str(item.default) for item in fields(cls) if item.name == "kind"), "")


def _chosen(item: Field[Any]) -> str:
    if item.default_factory is MISSING:
        return "required"
    made = item.default_factory()
    return f"`{kind}`" if (kind := _kind(type(made))) else ""


def _default(item: Field[Any]) -> str:
    if item.default is not MISSING:
        value = item.default
    elif item.default_factory is not MISSING:
        value = item.default_factory()
    else:
        return "required"
    if is_dataclass(value):
        return ""
    words = {True: "true", False: "false", None: "none"}
    known = next((word for key, word in words.items() if value is key), None)
    return known or (f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`")


def _said(cls: type) -> dict[str, str]:
    """Return the strings below the fields of a class, by field name."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for above, below in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[above.target.id] = cell(str(below.value.value))
    return found


def alternatives() -> str:
    """Return the table of README.md that compares other tools."""
    section = README.read_text().partition("## Compared with other tools")[2].partition("\n## ")[0]
    return "\n".join(line for line in section.splitlines() if line.startswith("|"))


TABLES: dict[str, Callable[..., str]] = {
    "alternatives": alternatives,
    "metrics": metrics,
    "all-metrics": all_metrics,
    "formats": formats,
    "commands": commands,
    "recipe": recipe,
}
"""Functions that return the table for `<!-- table: NAME ARGUMENT -->`, by NAME."""
