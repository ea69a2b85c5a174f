"""A session in the terminal, or from a script.

    python -m sdpo_trl.online --model Qwen/Qwen3-0.6B
    python -m sdpo_trl.online --model Qwen/Qwen3-0.6B --folder work --script session.yaml

Needs the extra `online`: `pip install "sdpo-trl[online]"`.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from .script import Script, ScriptError, load_script

TEACHERS = ("ema", "live", "base", "snapshot", "trust_region")


class Unusable(Exception):
    """The session cannot begin; the message is for the person."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        "python -m sdpo_trl.online",
        description="Work with a local model that calls tools; deny what it does with a correction, and it learns.",
    )
    add = options.add_argument
    add("--model", required=True, help="A chat model: a Hub id or a folder.")
    add("--folder", type=Path, default=Path(), help="What its tools may read and write. Default: this one.")
    add(
        "--save",
        type=Path,
        help="Where the session is kept and found again. Default: runs/online, or none for a script.",
    )
    add("--script", type=Path, help="Play this YAML file instead of asking.")
    add("--teacher", choices=TEACHERS, default=None, help="Whose distribution is learned from. Default: ema.")
    add("--shell", choices=("sandbox", "unsafe", "none"), default="sandbox", help="How approved commands run.")
    add("--no_tools", action="store_true", help="A conversation without tools.")
    add("--system", help="A system prompt.")
    add("--rank", type=int, default=16, help="Of the LoRA adapter that learns; 0: all of the model does. Default: 16.")
    add("--learning_rate", type=float, default=None)
    add("--temperature", type=float, default=None, help="Of sampling.")
    add("--max_completion_length", type=int, default=None, help="Tokens of an answer.")
    add("--seed", type=int, default=42)
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Any other field of SDPOConfig, such as distillation_alpha=1.0. May be given several times.",
    )
    add("--debug", action="store_true", help="Show where an error comes from.")
    return options


def fields(args: argparse.Namespace, script: Script | None) -> dict[str, Any]:
    """
    Fields of the session's `SDPOConfig`: the script's, then those of the command line.

    Raises:
        [`Unusable`]: names the field.
    """
    import yaml

    from ..config import SDPOConfig

    chosen = {} if script is None else dict(script.config)
    for entry in args.set:
        name, equals, value = entry.partition("=")
        if not equals:
            raise Unusable(f"--set {entry}: write NAME=VALUE.")
        try:
            chosen[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise Unusable(f"--set {entry}: {error}") from error
    unknown = [name for name in chosen if name not in SDPOConfig.__dataclass_fields__]
    if unknown:
        raise Unusable(f"SDPOConfig has no field {unknown[0]!r}.")
    named = {"teacher_model_kind": args.teacher, "seed": args.seed}
    for name in ("learning_rate", "temperature", "max_completion_length"):
        named[name] = getattr(args, name)
    return {**chosen, **{name: value for name, value in named.items() if value is not None}}


def _closed(folder: Path, save: Path | None) -> list[str]:
    """Where the session keeps its files, if that is in the working folder: the tools may not look there."""
    if save is None:
        return []
    inside, where = folder.resolve(), save.resolve()
    return [where.relative_to(inside).as_posix()] if where != inside and where.is_relative_to(inside) else []


def open_desk(args: argparse.Namespace, script: Script | None, screen: Any) -> Any:
    """
    The working folder and the session in it, continued where there is one.

    Raises:
        [`Unusable`]: with what was wrong.
    """
    from peft import LoraConfig

    from . import OnlineSession, online_config
    from .desk import Desk, shell_kind

    chosen = fields(args, script)
    save = args.save
    kind, missing = shell_kind(args.shell)
    if missing is not None and not args.no_tools:
        screen.print(f"note: {missing}", style="yellow")
    try:
        desk = Desk(None if args.no_tools else args.folder, kind, _closed(args.folder, save))
        config = online_config(str(save or "runs/online"), **chosen)
        system = args.system or (script.system if script is not None else None)
        options: dict[str, Any] = {"args": config, "tools": desk.functions()}
        if save is not None:
            save.mkdir(parents=True, exist_ok=True)
            options["journal"] = save / "journal.jsonl"
        if save is not None and (save / "session").is_dir():
            screen.print(f"continuing the session in {save}", style="dim")
            desk.session = OnlineSession.load(save / "session", **options)
        else:
            lora = (
                LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear") if args.rank else None
            )
            messages = [{"role": "system", "content": system}] if system else []
            desk.session = OnlineSession(args.model, peft_config=lora, messages=messages, **options)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        if args.debug:
            raise
        said = " ".join(str(error).split())
        raise Unusable(f"The session cannot begin: {said}") from error
    return desk


def main(argv: list[str] | None = None) -> int:
    """Parse, load, talk. Exit status 0; 1 where a script's expectation failed; 2 where nothing could begin."""
    options = parser()
    args = options.parse_args(argv)
    try:
        script = None if args.script is None else load_script(args.script)
    except (ScriptError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if script is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        options.error("a session needs a terminal; `--script FILE` plays one without")
    if args.rank < 0:
        options.error("--rank is at least 0")
    if script is None and args.save is None:
        args.save = Path("runs/online")
    _quiet()
    from .terminal import console, plain

    screen = console()
    try:
        with screen.status("loading") if script is None else _nothing():
            desk = open_desk(args, script, screen)
    except Unusable as error:
        print(plain(str(error)), file=sys.stderr)
        return 2
    with desk.session:
        if script is not None:
            from .play import Player

            return Player(desk, screen, None if args.save is None else args.save / "session").play(script)
        from .app import App

        where = "no tools" if args.no_tools else f"in {args.folder.resolve()}"
        title = f"{args.model}, {where}; the session is kept in {args.save}"
        return App(desk, args.save / "session", screen, title=title).run()


def _quiet() -> None:
    """What libraries tell on loading is no part of a conversation."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.simplefilter("ignore", FutureWarning)
    import datasets
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


if __name__ == "__main__":
    sys.exit(main())
