"""A session in the terminal, or from a script.

    python -m sdpo_trl.online --model Qwen/Qwen3-0.6B
    python -m sdpo_trl.online --model Qwen/Qwen3-0.6B --folder work --script session.yaml

Needs the extra `online`: `pip install "sdpo-trl[online]"`.
"""

import argparse
import contextlib
import os
import sys
import warnings
from pathlib import Path

from .script import ScriptError, load_script

TEACHERS = ("ema", "live", "base", "snapshot", "trust_region")


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
    add("--rank", type=int, help="Of the LoRA adapter that learns; 0: all of the model does. Default: 16.")
    add("--learning_rate", type=float, default=None)
    add("--temperature", type=float, default=None, help="Of sampling.")
    add("--max_completion_length", type=int, default=None, help="Tokens of an answer.")
    add("--seed", type=int, default=None)
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Any other field of SDPOConfig, such as distillation_alpha=1.0. May be given several times.",
    )
    add("--debug", action="store_true", help="Show where an error comes from.")
    return options


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
    if args.rank is not None and args.rank < 0:
        options.error("--rank is at least 0")
    for name, path in (("--model", args.model), ("--folder", str(args.folder))):
        if path.startswith(("/", ".", "~")) and not Path(path).is_dir():
            options.error(f"{name} {path}: there is no such folder")
    if script is None and args.save is None:
        args.save = Path("runs/online")
    _quiet()
    from .start import Unusable, open_desk
    from .terminal import console, plain

    # A transcript in a file is as wide as its lines are, within reason.
    screen = console() if sys.stdout.isatty() else console(width=int(os.environ.get("COLUMNS", "160")))
    try:
        with screen.status("loading") if script is None else contextlib.nullcontext():
            desk = open_desk(args, script, screen)
    except Unusable as error:
        print(plain(str(error)), file=sys.stderr)
        return 2
    with desk.session:
        if script is not None:
            from .play import Player

            player = Player(desk, screen, None if args.save is None else args.save / "session")
            status = player.play(script)
            try:
                if player.save_to is not None:
                    player.save(player.save_to)
            except OSError as error:
                print(plain(f"The session was not saved: {error}"), file=sys.stderr)
                return 2
            return status
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


if __name__ == "__main__":
    sys.exit(main())
