"""JSON and paths from anywhere: what is read may be broken, or made to do harm.

A link is followed, for the cache of Hugging Face is made of them; a pipe or a device, which
may never end, is not read.
"""

import json
import os
from collections import Counter
from pathlib import Path

from k3_teach.errors import InputError, K3Error, shown

LARGEST = 1 << 28       # bytes of a JSON file: the index of K3 has 60 MB


def as_path(path, name: str = "folder") -> Path:
    """`path` as a Path. InputError for what cannot be the name of a file or folder."""
    try:
        given = Path(path)
        os.stat(given)
    except FileNotFoundError:       # it may be made yet
        return given
    except (TypeError, ValueError, OSError):
        raise InputError(f"{name} is {shown(path)}; it must be a path") from None
    return given


def read_json(path: Path, error: type[K3Error]):
    """What stands in a JSON file. `error`, naming the file, for one that is not there, no
    ordinary file, too large, not UTF-8, not JSON, too deep, or names a field twice."""
    try:
        if not path.exists():
            raise error(f"{path}: there is no such file")
        if not path.is_file() or path.stat().st_size > LARGEST:
            raise ValueError(f"it must be an ordinary file of at most {LARGEST} bytes")
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except error:
        raise
    except (OSError, ValueError, RecursionError) as e:
        raise error(f"{path}: not a readable JSON file ({e})") from None


def _once(pairs: list[tuple]) -> dict:
    """An object of a JSON file; json itself would take the last of two equal names."""
    if len(found := dict(pairs)) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{name[:80]!r} stands twice in an object")
    return found
