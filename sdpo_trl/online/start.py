"""Opening a session from the command line: options, the working folder, the model, what was kept.

Knows: where a session keeps its files, and that it goes on with the options it began with. Deliberately does not know:
how it is talked to.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import yaml
from peft import LoraConfig, PeftConfig, PeftModel
from rich.console import Console
from trl.trainer.utils import create_model_from_path

from ..config import SDPOConfig
from ..environments.sandbox import SandboxUnavailable
from . import OnlineSession, online_config
from .desk import Desk, shell_kind
from .records import SessionError
from .script import Script


class Unusable(Exception):
    """The session cannot begin; the message is for the person."""


def fields(args: argparse.Namespace, script: Script | None) -> dict[str, Any]:
    """
    Fields of the session's `SDPOConfig`: the script's, then those of the command line.

    Raises:
        [`Unusable`]: names the field.
    """
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
    named = {"teacher_model_kind": args.teacher}
    for name in ("learning_rate", "temperature", "max_completion_length", "seed"):
        named[name] = getattr(args, name)
    return {**chosen, **{name: value for name, value in named.items() if value is not None}}


def _kept(args: argparse.Namespace, chosen: dict[str, Any]) -> dict[str, Any]:
    """
    The options of a session that is kept: those it began with, then those chosen now.

    Raises:
        [`Unusable`]: it is the session of another model.
    """
    file = args.save / "options.json"
    before: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if before and before["model"] != args.model:
        raise Unusable(
            f"{args.save} keeps a session with {before['model']}, not with {args.model}: give --model "
            f"{before['model']}, or another folder with --save."
        )
    if before and args.rank not in (None, before["rank"]):
        raise Unusable(f"{args.save} keeps a session with --rank {before['rank']}; another needs another --save.")
    return {
        "model": args.model,
        "rank": before.get("rank", 16 if args.rank is None else args.rank),
        "fields": {**before.get("fields", {}), **chosen},
    }


def _keep(save: Path, options: dict[str, Any]) -> None:
    """Write the options down for the next time."""
    new = save / "options.new"
    new.write_text(json.dumps(options, indent=1), encoding="utf-8")
    new.replace(save / "options.json")


def _closed(folder: Path, save: Path | None) -> list[str]:
    """Where the session keeps its files, if that is in the working folder: the tools may not look there."""
    if save is None:
        return []
    inside, where = folder.resolve(), save.resolve()
    return [where.relative_to(inside).as_posix()] if where != inside and where.is_relative_to(inside) else []


def open_desk(args: argparse.Namespace, script: Script | None, screen: Console) -> Desk:
    """
    The working folder and the session in it, continued where there is one.

    Raises:
        [`Unusable`]: with what was wrong.
    """
    if not args.no_tools and not args.folder.is_dir():
        raise Unusable(f"--folder {args.folder}: there is no such folder.")
    if args.save is not None and args.save.resolve() == args.folder.resolve() and not args.no_tools:
        raise Unusable(f"--save {args.save}: keep the session in another folder than the one its tools work in.")
    kind, missing = shell_kind(args.shell)
    if missing is not None and not args.no_tools:
        screen.print(f"note: {missing}", style="yellow")
    chosen, rank = fields(args, script), 16 if args.rank is None else args.rank
    try:
        kept = {} if args.save is None else _kept(args, chosen)
        chosen, rank = kept.get("fields", chosen), kept.get("rank", rank)
        desk = Desk(None if args.no_tools else args.folder, kind, _closed(args.folder, args.save))
        config = online_config(str(args.save or "runs/online"), **chosen)
        system = args.system or (script.system if script is not None else None)
        options: dict[str, Any] = {"args": config, "tools": desk.functions()}
        if args.save is not None:
            args.save.mkdir(parents=True, exist_ok=True)
            options["journal"] = args.save / "journal.jsonl"
        if args.save is not None and (args.save / "session").is_dir():
            screen.print(f"continuing the session in {args.save}", style="dim")
            desk.session = OnlineSession.load(args.save / "session", **options)
        else:
            options["messages"] = [{"role": "system", "content": system}] if system else []
            desk.session = OnlineSession(**_student(args.model, rank), **options)
        if kept:
            _keep(args.save, kept)
    except SandboxUnavailable as error:
        raise Unusable(f"{error} Or take `--shell none`.") from error
    except (OSError, ValueError, TypeError, NotImplementedError, SessionError) as error:
        if args.debug:
            raise
        said = " ".join(str(error).split())
        raise Unusable(f"The session with {args.model} cannot begin: {said}") from error
    return desk


def _student(name: str, rank: int) -> dict[str, Any]:
    """A session's `model` and `peft_config`; an adapter's folder goes on training that adapter."""
    folder = Path(name)
    if (folder / "adapter_config.json").is_file():
        base = PeftConfig.from_pretrained(name).base_model_name_or_path
        return {"model": PeftModel.from_pretrained(create_model_from_path(base), name, is_trainable=True)}
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear") if rank else None
    return {"model": name, "peft_config": lora}
