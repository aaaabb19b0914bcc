"""What to run next: the closing line of commands that make something for others."""

from __future__ import annotations

import shlex

from stride_cli import output


def next_step(*words: str, why: str = "next") -> None:
    """Say, on stderr, the command to run next, such that it can be pasted: paths and patterns are quoted.

    Parameters
    ----------
    words : of the command, each an argument of its own; "…" stands for what only the user knows
    why : what stands before it
    """
    output.note(f"{why}: {' '.join(_word(word) for word in words)}")


def _word(word: str) -> str:
    return f'"{word}"' if word == "…" else shlex.quote(word)
