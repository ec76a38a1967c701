"""Writes the completion script of a shell, made from the parsers of all commands: `headrace completion bash|zsh|fish`."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from headrace.base.errors import EXIT_OK
from headrace.cli.command_parser import CommandParser

EXAMPLES = """examples:
  source <(headrace completion bash)      in this shell, or in ~/.bashrc for all
  headrace completion bash > ~/.local/share/bash-completion/completions/headrace
  headrace completion zsh > ~/.zfunc/_headrace                  a folder of $fpath
  headrace completion fish > ~/.config/fish/completions/headrace.fish"""

_SCRIPT = """# Completion of the headrace command, made by `headrace completion bash` of this version.
_headrace() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} path='' word
    for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
        case "${{path:+$path }}$word" in
            {paths}) path="${{path:+$path }}$word" ;;
        esac
    done
    COMPREPLY=()
    case "$path $before" in
{values}
    esac
    case "$path" in
{words}
    esac
}}
complete -o bashdefault -o default -F _headrace headrace
"""


# zsh has the functions of bash's completion as a module; only the way in differs.
_ZSH = """#compdef headrace
# Completion of the headrace command, made by `headrace completion zsh` of this version.
autoload -Uz bashcompinit && bashcompinit
{bash}
_bash_complete -o bashdefault -o default -F _headrace_words
"""

_FISH = """# Completion of the headrace command, made by `headrace completion fish` of this version.
function __headrace_path
    set -l path
    for word in (commandline -opc)[2..-1]
        switch (string join ' ' -- $path $word)
            case {paths}
                set -a path $word
        end
    end
    string join ' ' -- $path
end
function __headrace_at
    set -l path (__headrace_path)
    test "$path" = "$argv[1]"
end
{words}
"""


@dataclass(frozen=True, slots=True)
class CommandWords:
    """The words that may follow a command: `commands` below it, its options, and the values of those that have a list."""

    path: str  # the command's words, `worker drain`; empty = headrace itself
    commands: tuple[str, ...]
    options: tuple[str, ...]
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)  # option → what it takes
    free: frozenset[str] = frozenset()  # options that take any value


def add_completion(commands: Any, about: str) -> None:
    """Add `completion`."""
    parser = commands.add_parser(
        "completion",
        help=about,
        description="Print a script that completes commands, options and their values in a shell.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=tuple(_SCRIPTS), help="the shell")
    parser.set_defaults(run=_run, prog="headrace completion")


def _run(parsed: argparse.Namespace) -> int:
    from headrace.cli import build_parser, command_names

    sys.stdout.write(_SCRIPTS[parsed.shell](all_words(build_parser, command_names())))
    return EXIT_OK


def all_words(build: Callable[[str | None], argparse.ArgumentParser], names: Iterable[str]) -> list[CommandWords]:
    """Return the words of every command. `build` makes the parser in which one command has what is below it."""
    found = [_words("", build(None))]
    for name in names:
        top = build(name)
        assert isinstance(top, CommandParser)  # noqa: S101  # by construction
        found += _below(name, top.below()[name])
    return found


def _below(path: str, parser: argparse.ArgumentParser) -> list[CommandWords]:
    found = [_words(path, parser)]
    if isinstance(parser, CommandParser):
        for name, below in parser.below().items():
            found += _below(f"{path} {name}", below)
    return found


def _words(path: str, parser: argparse.ArgumentParser) -> CommandWords:
    if not isinstance(parser, CommandParser):
        raise TypeError(f"the parser of {path!r} has no words")
    options = parser.options()
    taking = {name: action for name, action in options.items() if action.nargs != 0}
    values = {name: found for name, action in taking.items() if (found := _values(action))}
    return CommandWords(
        path,
        tuple(parser.below()),
        tuple(name for name in options if name.startswith("--")),
        values,
        frozenset(set(taking) - set(values)),
    )


def _values(action: argparse.Action) -> tuple[str, ...]:
    """Return the values that an option takes if it has a list of them; those of settings stand in their metavar, `a|b`."""
    if action.choices:
        return tuple(map(str, action.choices))
    parts = str(action.metavar or "").split("|")
    return tuple(part for part in parts if re.fullmatch(r"[a-z0-9][a-z0-9._-]*", part)) if len(parts) > 1 else ()


def bash_script(words: Iterable[CommandWords]) -> str:
    """Return the script for bash. Where nothing is known of a value, bash completes file names."""
    every = list(words)
    values, cases = [], []
    for one in every:
        for option, choices in one.values.items():
            values.append(_case(f"{one.path} {option}", choices, after="return"))
        if one.free:
            patterns = "|".join(shlex.quote(f"{one.path} {option}") for option in sorted(one.free))
            values.append(f"        {patterns}) return ;;")
        cases.append(_case(one.path, (*one.commands, *one.options)))
    paths = "|".join(shlex.quote(one.path) for one in every if one.path)
    return _SCRIPT.format(paths=paths, values="\n".join(values), words="\n".join(cases))


def _case(pattern: str, words: Iterable[str], *, after: str = "") -> str:
    reply = f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(words))} -- "$current"))'
    return f"        {shlex.quote(pattern)}) {reply}{f'; {after}' if after else ''} ;;"


def zsh_script(words: Iterable[CommandWords]) -> str:
    """Return the script for zsh: that of bash, by zsh's own module for it."""
    # zsh loads the file as the function _headrace, and calls it for the first completion.
    return _ZSH.format(bash=bash_script(words).replace("_headrace", "_headrace_words"))


def fish_script(words: Iterable[CommandWords]) -> str:
    """Return the script for fish. Where nothing is known of a value, fish completes file names."""
    every = list(words)
    lines = []
    for one in every:
        here = f"complete -c headrace -n \"__headrace_at '{one.path}'\""
        if one.commands:
            lines.append(f"{here} -f -a {_fish_words(one.commands)}")
        for option in one.options:
            name = option.removeprefix("--")
            if option in one.values:
                lines.append(f"{here} -l {name} -x -a {_fish_words(one.values[option])}")
            else:
                lines.append(f"{here} -l {name}{' -r' if option in one.free else ''}")
    paths = " ".join(_fish_words([one.path]) for one in every if one.path)
    return _FISH.format(paths=paths, words="\n".join(lines))


def _fish_words(words: Iterable[str]) -> str:
    """Return words as one quoted argument of fish, in which only these two characters mean something."""
    text = " ".join(words).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


_SCRIPTS: dict[str, Callable[[Iterable[CommandWords]], str]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}
