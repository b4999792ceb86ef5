"""`scalerl completion`: a shell script that completes commands, options, files and names."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scalerl.cli.shared.arguments import option

_SHELLS = ("bash", "zsh", "tcsh", "fish")

_FOLDERS = ("RUN", "FOLDER")
_FILES = ("FILE", "RUN|FILE", "FOLDER|FILE", "SOURCE", "STUDY.toml")
"""The metavars of arguments that are files, or files and folders."""

HELP = "print a script for completion in a shell"
ABOUT = "Print a script that completes commands, options, files, and names such as recipes."
EXAMPLES = """
  source <(scalerl completion bash)                                # in ~/.bashrc
  scalerl completion zsh > "${fpath[1]}/_scalerl"                  # then restart zsh
  scalerl completion fish > ~/.config/fish/completions/scalerl.fish
  scalerl completion tcsh > ~/.scalerl.tcsh                        # and in ~/.tcshrc: source ~/.scalerl.tcsh
"""


def add(completion: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option(completion, "shell SHELL", ", ".join(_SHELLS), choices=_SHELLS)


def run(args: argparse.Namespace) -> None:
    """Print the script of a shell."""
    import shtab

    known = _known()
    for action in _actions(args.parser):
        if isinstance(action.metavar, str) and action.metavar in known:
            action.complete = known[action.metavar]  # type: ignore[attr-defined]
    print(shtab.complete(args.parser, args.shell))


def _known() -> dict[str, Mapping[str, Any]]:
    """Return the completion of arguments by their metavars, which mean the same in all commands."""
    import shtab

    from scalerl.ingest.formats.recognise import formats
    from scalerl.ingest.vocabularies import BY_TRAINER
    from scalerl.record.evaluation import AXES

    recipes = sorted(path.stem for path in (Path(__file__).parent.parent / "recipes").glob("*.toml"))
    return {
        **dict.fromkeys(_FOLDERS, shtab.DIRECTORY),
        **dict.fromkeys(_FILES, shtab.FILE),
        "RECIPE": _words("recipes", recipes, with_files=True),
        "AXIS": _words("axes", list(AXES)),
        "FORMAT": _words("formats", [one.name for one in formats()]),
        "TRAINER": _words("trainers", list(BY_TRAINER)),
    }


def _words(name: str, words: list[str], with_files: bool = False) -> dict[str, Any]:
    """Return the completion of some words, optionally with files (tcsh supports only one of the two)."""
    listed = " ".join(words)
    bash, zsh, fish = f'compgen -W "{listed}" -- "$1"', f"compadd {listed}", f"printf '%s\\n' {listed}"
    if with_files:
        name = f"{name}_files"  # shtab's bash adds a slash to folders if the function has such a name
        bash, zsh = f'{bash}; compgen -f -- "$1"', f"{zsh}; _files"
        fish = f"{fish}; __fish_complete_path (commandline -ct)"
    function = f"_scalerl_{name}"
    return {
        "bash": function,
        "zsh": function,
        "tcsh": "f" if with_files else f"({listed})",
        "fish": f"({fish})",
        "preamble": {"bash": f"{function}() {{ {bash}; }}", "zsh": f"{function}() {{ {zsh} }}"},
    }


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
