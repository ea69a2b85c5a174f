"""Which checkpoint folders are whole: a process that was killed while it wrote leaves one that is not.

Knows: names and formats of files. Deliberately does not know: what is in them, trainers.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

_STATE = "trainer_state.json"  # `Trainer` writes it last
_WEIGHTS = (
    "model*.safetensors", "pytorch_model*", "adapter_model.*", "*/adapter_model.*",
    "latest",  # DeepSpeed's, written after its weights
)  # fmt: skip


def _is_torn(path: Path) -> bool:
    """Whether a file stops before its end, seen without reading its tensors."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                return False
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    except (SafetensorError, ValueError):
        return True
    return path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path)


def damage(folder: Path) -> str | None:
    """What of a checkpoint is missing or cut off, or `None` if it is whole."""
    if not (folder / _STATE).is_file():
        return f"has no {_STATE}, which is written last"
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        return "has no weights"
    torn = [path.name for path in sorted(folder.iterdir()) if path.is_file() and _is_torn(path)]
    if torn:
        return f"holds a file that was cut off: {', '.join(torn)}"
    for index in folder.glob("*.index.json"):
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing:
            return f"lacks {missing[0]}"
    return None


def _numbered(output_dir: str | Path) -> dict[int, Path]:
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if path.is_dir()]
    return {int(match[1]): path for path in folders if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))}


def last_complete(output_dir: str, needed: Iterable[str] = ()) -> tuple[Path | None, dict[Path, str]]:
    """
    The latest checkpoint that is whole, and what is wrong with each later one.

    Args:
        output_dir (`str`): The run's folder.
        needed (`Iterable[str]`): Files that a checkpoint must also have.
    """
    passed: dict[Path, str] = {}
    for _, folder in sorted(_numbered(output_dir).items(), reverse=True):
        missing = [name for name in needed if not (folder / name).is_file()]
        wrong = damage(folder) or (f"lacks {missing[0]}" if missing else None)
        if wrong is None:
            return folder, passed
        passed[folder] = wrong
    return None, passed


def set_aside(output_dir: str | Path, step: int) -> list[Path]:
    """
    Rename the broken checkpoints of later steps; gives their new paths.

    `save_total_limit` may go by the number in the name: it would keep a broken one and delete the whole one that was
    just written. The new name begins as what is never pushed to the Hub.
    """
    renamed = []
    for number, folder in _numbered(output_dir).items():
        if number > step and damage(folder) is not None:
            aside = folder.with_name(f"_incomplete-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)  # an earlier one of the same step
            renamed.append(folder.rename(aside))
    return renamed
