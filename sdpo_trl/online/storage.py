"""The folder of a saved session: a checkpoint of the trainer's, with the conversation beside it.

It is what `SDPOTrainer.train(resume_from_checkpoint=...)` and PEFT read, too. Written whole or not at all: beside the
old one first, which goes when the new one is complete. Knows: files, a trainer's checkpoint. Deliberately does not
know: what is in a conversation.
"""

import json
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peft import PeftConfig
from transformers import AutoTokenizer

from ..checkpoints import damage
from ..files import attribute
from .state import SessionState

SESSION = "session.json"


def _older(folder: Path) -> Path:
    """Where the session that is replaced waits until the new one is there; no name that a person would choose."""
    return folder.with_name(f".{folder.name}.replaced")


def write(trainer: Any, folder: Path, session: dict[str, Any]) -> None:
    """
    Save a trainer between two updates.

    Args:
        trainer ([`OnlineTrainer`]): Student, teacher, optimizer, schedule, counters, random states.
        folder (`Path`): Replaced if it is there.
        session (`dict`): What belongs to the conversation.

    Raises:
        `FileExistsError`: the folder is there and holds no session.
        `OSError`: it cannot be written; an older session in it is as it was.
    """
    folder = folder.resolve()  # a link stays, what it names is replaced
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file. Take another folder.")
    if folder.exists() and any(folder.iterdir()) and not (folder / SESSION).is_file():
        raise FileExistsError(f"{folder} holds something else than a session. Take another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}-*.partial"):  # by a process that was killed while it saved
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-", suffix=".partial") as made:
        with ExitStack() as stack:
            for name, value in (("output_dir", made), ("push_to_hub", False), ("save_only_model", False)):
                stack.enter_context(attribute(trainer.args, name, value))
            trainer._save_checkpoint(trainer.model, None)
        whole = Path(made) / f"checkpoint-{trainer.state.global_step}"
        (whole / SESSION).write_text(json.dumps(session), encoding="utf-8")
        old = _older(folder)
        if folder.exists():  # else a process was killed between these two, and the old one is all there is
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        whole.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def find(folder: "str | Path") -> Path:
    """
    The folder of a session, or the older one beside it if the process was killed between the two renames.

    Raises:
        `FileNotFoundError`: there is neither.
        `ValueError`: it is incomplete.
    """
    folder = Path(folder).resolve()
    chosen = next((path for path in (folder, _older(folder)) if (path / SESSION).is_file()), None)
    if chosen is None:
        raise FileNotFoundError(f"There is no saved session in {folder}: it holds no {SESSION}.")
    wrong = damage(chosen)
    if wrong is not None:
        raise ValueError(f"The session in {chosen} cannot be read: it {wrong}.")
    session_of(chosen)
    return chosen


def session_of(folder: Path) -> dict[str, Any]:
    """
    What belongs to the conversation.

    Raises:
        `ValueError`: the file is not as `write` left it.
    """
    path = folder / SESSION
    session = json.loads(path.read_text(encoding="utf-8"))
    wanted = {"state": dict, "updates": list, "metrics": list, "version": int}
    held = session if isinstance(session, dict) else {}
    wrong = [name for name, kind in wanted.items() if not isinstance(held.get(name), kind)]
    if wrong:
        raise ValueError(
            f"{path} lacks {', '.join(map(repr, wrong))}, or holds something else there. Was it edited? Take another "
            "saved session."
        )
    return session


def state_of(folder: Path) -> SessionState:
    """
    The conversation as it was saved.

    Raises:
        `ValueError`: the file is not as `write` left it.
    """
    try:
        return SessionState.of(session_of(folder)["state"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The conversation in {folder / SESSION} cannot be read ({type(error).__name__}: {error}). Was it edited? "
            "Take another saved session."
        ) from error


def adapter_of(folder: Path) -> PeftConfig | None:
    """The adapter's configuration, to be trained on; `None` if the folder holds a whole model."""
    if not (folder / "adapter_config.json").is_file():
        return None
    config = PeftConfig.from_pretrained(folder)
    config.inference_mode = False
    return config


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer beside the weights."""
    return AutoTokenizer.from_pretrained(folder, padding_side="left")
