"""What can go wrong around a run, told to a person: what, where, and what to do. And the options that bound it.

Knows: calls that fail or hang, disks that refuse. Deliberately does not know: trainers, models, losses.
"""

import asyncio
import contextvars
import errno
import inspect
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from trl.trainer.utils import is_async_callable

_REFUSALS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT,
    errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG,
}  # fmt: skip
_TORCH_CANNOT_WRITE = (
    "PytorchStreamWriter",
    "inline_container",
    "cannot be opened",
    "Parent directory",
    "iostream error",
)
_LONGEST_PROMPT = 200


@dataclass
class FaultOptions:
    """
    The part of [`SDPOConfig`] that says when a broken run ends. While nothing breaks, none of it changes anything.

    Parameters:
        > Faults

        reward_timeout (`float`, *optional*):
            Seconds that one call of a reward function or of `feedback_func` may take (a call grades all answers of
            this process's batch); then the run ends with an error that names the prompts. `None` waits for ever. An
            async function is cancelled. Any other one runs in a thread, which Python cannot stop: it is abandoned and
            ends with the process. In a thread no signal can be used: a function that sets alarms, or must be called
            in the main thread for another reason, bounds its time itself, says so by a true attribute `limits_itself`
            (as [`MathReward`] does), and is not bounded here. Neither are an async function that blocks its event
            loop, a reward model, a tool and an environment.
        max_nonfinite_steps (`int`, *optional*, defaults to `3`):
            Optimizer steps with an infinite or NaN gradient are skipped with a warning; after this many in a row the
            run ends with an error. 0 applies such gradients as they come, as TRL does. With fp16 the loss scaler skips
            them by itself, uncounted. DeepSpeed decides by itself whether to skip; where it has applied one, the run
            ends at once.
    """

    reward_timeout: float | None = field(
        default=None, metadata={"help": "Seconds that one call of a reward or feedback function may take."}
    )
    max_nonfinite_steps: int = field(
        default=3,
        metadata={"help": "Steps in a row with a NaN or infinite gradient that are skipped. 0 applies them."},
    )

    def _check_fault_ranges(self) -> None:
        seconds, steps = self.reward_timeout, self.max_nonfinite_steps
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf
        ):
            raise ValueError(f"`reward_timeout` must be positive seconds, got {seconds!r}. `None` waits for ever.")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"`max_nonfinite_steps` must be whole and not negative, got {steps!r}.")


class RewardError(RuntimeError):
    """A reward or feedback function failed, hung, or gave what cannot be a reward."""


class CheckpointError(OSError):
    """Something that the run should write could not be written."""


def shown_prompts(prompts: list[Any]) -> str:
    """Each prompt once, one a line, cut to a readable length; of a conversation its last turn."""
    lines = {}
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))
        lines[text if len(text) <= _LONGEST_PROMPT else f"{text[:_LONGEST_PROMPT]}..."] = None
    return "\n".join(f"- {line}" for line in lines)


def check_numbers(result: Any) -> str | None:
    """What is wrong with a reward function's result, `None` if each reward is a number or `None`."""
    if isinstance(result, str) or not isinstance(result, Iterable):
        return f"gave {_named(result)} instead of a list with a number or `None` per answer"
    # Of an array or a tensor the type decides, and TRL counts.
    wrong = [x for x in result if isinstance(x, (str, bytes, list, tuple, dict))] if isinstance(result, list) else []
    return f"gave a list with {_named(wrong[0])} in it; each reward must be a number or `None`" if wrong else None


def _named(value: Any) -> str:
    return "`None`" if value is None else f"a {type(value).__name__} ({value!r:.40})"


def guarded(
    func: Callable[..., Any],
    name: str,
    timeout: float | None,
    advice: Callable[[], str],
    check: Callable[[Any], str | None] | None = None,
) -> Callable[..., Any]:
    """
    The same function; if it fails or takes too long, a [`RewardError`] names it and the prompts it was given.

    Args:
        func (`Callable`): Sync or async; takes `prompts` first, or by name.
        name (`str`): What it is called in the error.
        timeout (`float`, *optional*): As `reward_timeout`.
        advice (`Callable`): Says how to go on after the failure.
        check (`Callable`, *optional*): Says what is wrong with a result, `None` if nothing is.
    """

    def checked(result: Any, prompts: list[Any]) -> Any:
        wrong = None if check is None else check(result)
        if wrong is not None:
            raise failure(wrong, prompts)
        return result

    def failure(what: str, prompts: list[Any]) -> RewardError:
        return RewardError(
            f"{name} {what}. It had {len(prompts)} answers to judge, to these prompts:\n{shown_prompts(prompts)}\n"
            f"{advice()}"
        )

    def late(prompts: list[Any], what_of_it: str) -> RewardError:
        return failure(f"did not answer within `reward_timeout={timeout}` seconds; {what_of_it}", prompts)

    async def awaited(result: Any, prompts: list[Any]) -> Any:
        task = asyncio.ensure_future(result)
        done, _ = await asyncio.wait({task}, timeout=timeout)
        if not done:
            task.cancel()  # not waited for: it could refuse
            raise late(prompts, "it was cancelled")
        try:
            outcome = task.result()
        except Exception as error:  # whatever a user's function raises
            raise failure(f"failed with {type(error).__name__}: {error}", prompts) from error
        return checked(outcome, prompts)

    async def guard_async(*args: Any, **kwargs: Any) -> Any:
        return await awaited(func(*args, **kwargs), args[0] if args else kwargs["prompts"])

    def guard(*args: Any, **kwargs: Any) -> Any:
        prompts = args[0] if args else kwargs["prompts"]
        call = partial(func, *args, **kwargs)
        try:
            result = call() if timeout is None else _in_thread(call, timeout)
        except _Late as error:
            raise late(prompts, "its thread was abandoned, since Python cannot stop one") from error
        except Exception as error:  # whatever a user's function raises
            raise failure(f"failed with {type(error).__name__}: {error}", prompts) from error
        return awaited(result, prompts) if inspect.iscoroutine(result) else checked(result, prompts)

    return guard_async if is_async_callable(func) else guard


class _Late(Exception):
    """A call took too long."""


def _in_thread(call: Callable[[], Any], timeout: float) -> Any:
    """The call's result, computed in a thread under this one's context, gradient mode and device."""
    outcome: Future = Future()
    context, gradient = contextvars.copy_context(), torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def work() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        try:
            with torch.set_grad_enabled(gradient):
                outcome.set_result(context.run(call))
        except BaseException as error:  # raised again where the result is waited for
            outcome.set_exception(error)

    threading.Thread(target=work, name="sdpo-reward", daemon=True).start()
    try:
        return outcome.result(timeout)
    except FutureTimeoutError as error:
        if outcome.done():  # the call's own
            raise
        raise _Late from error


def _cannot_write(error: Exception, path: Path) -> bool:
    """Whether the error is a disk's or a folder's, about `path` or what lies beside it."""
    if isinstance(error, OSError):
        if error.filename is not None:
            other, path = Path(str(error.filename)).absolute(), path.absolute()
            if not (other.is_relative_to(path.parent) or path.is_relative_to(other)):
                return False
        return error.errno in _REFUSALS and not isinstance(error, HfHubHTTPError)
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in _TORCH_CANNOT_WRITE)
    return type(error) in (Exception, SafetensorError) and "os error" in str(error)  # Rust's words


@contextmanager
def writing(path: Path, advice: Callable[[], str]) -> Iterator[None]:
    """
    Within, what a disk or a folder refuses is raised as a [`CheckpointError`] that names `path` and what to do.

    Args:
        path (`Path`): What is being written.
        advice (`Callable`): Says how to go on after the failure.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises no narrower class
        if not _cannot_write(error, path):
            raise
        raise CheckpointError(f"{path} could not be written ({error}). {_remedy(path, error)} {advice()}") from error


def _remedy(path: Path, error: Exception) -> str:
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free / 2**20
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "os error 28" in str(error) or free < 1:
        return (
            f"{free:.1f} MB are free on the disk of {existing}: make room, keep fewer checkpoints "
            "(`save_total_limit`), or give an `output_dir` on another disk."
        )
    return f"Make {existing} a folder that this user may write to, or give another `output_dir`."


def check_output_folder(folder: str, writes: bool) -> None:
    """
    Refuse an output folder that cannot be made or, with `writes`, not be written to, before anything is computed.

    Raises:
        `CheckpointError`: names the folder and what to do.
    """
    with writing(Path(folder), lambda: "Nothing has been computed yet."):
        os.makedirs(folder, exist_ok=True)
        if writes:
            with tempfile.TemporaryFile(dir=folder):
                pass
