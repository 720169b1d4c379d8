"""Flags that hold paths: `~/` in them stands for the home folder, and an empty text is not a path."""

from __future__ import annotations

import os
import re
from typing import Any

from rlhf_suite.config.flags import FlagInfo, kind, walk
from rlhf_suite.registry import absolute

# By their names, so that a new flag needs no further mark: model_name_or_path, ckpt.output_dir, data.dataset, ...
PATH = re.compile(r"(.*[._])?(path|dir|dataset|url|tokenizer_chat_template)")
HOME = re.compile(r"(^|,)(\s*)(~[^/,]*)(?=/|,|$)")


def is_path(info: FlagInfo) -> bool:
    """Whether a flag holds a path, or a comma list of paths."""
    return kind(info.type).base is str and PATH.fullmatch(info.key) is not None


def with_home(text: str) -> str:
    """A path or a comma list of paths, with each `~` or `~user` at a beginning as the home folder."""
    return HOME.sub(lambda match: match[1] + match[2] + os.path.expanduser(match[3]), text)  # noqa: PTH111


def expand_home(section: Any) -> None:
    """Replace `~` in every path of a section, of the sections in it, and of the entries of its tables.

    The file of a user's own function becomes an absolute path: processes in other folders import it.
    """
    for info in walk(section):
        *parents, name = info.key.split(".")
        owner = section
        for parent in parents:
            owner = getattr(owner, parent)
        if isinstance(info.default, dict):
            for entry in info.default.values():
                expand_home(entry)
        elif is_path(info) and info.default is not None:
            setattr(owner, name, with_home(info.default))
        elif info.meta.algorithms is not None and info.default is not None:
            setattr(owner, name, absolute(info.default))
