"""Docstrings in Hugging Face's style as the Markdown that they nearly are: a griffe extension for mkdocstrings.

Sections (`Args:`, `Raises:`, ...) become lists, headings among the parameters (`> ...`) titles, and links
(``[`Name`]``) references; a link to a name that the package does not have ends the build. All modules' docstrings are
also one page: that of the made-up module `sdpo_trl.all_modules`.
"""

import re
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import griffe

_TITLES = {"Args": "Parameters", "Parameters": "Parameters", "Returns": "Returns", "Raises": "Raises"}
_SECTION = re.compile(rf"^({'|'.join(_TITLES)}):\n((?:(?: +[^\n]*)?(?:\n|\Z))+)", re.MULTILINE)
_PARAMETER = re.compile(r"([\w, ]+?)( \(.+?\))?:(?: |\n|$)")
_LINK = re.compile(r"\[`~?([\w.]+)`\](?![(\[])")
_ELSEWHERE = ("trl.", "transformers.", "peft.", "accelerate.", "datasets.")


def to_markdown(text: str, path: str = "") -> str:
    """The docstring (dedented) of the object at `path` with its sections as Markdown."""

    def section(match: re.Match[str]) -> str:
        title = _TITLES[match[1]]
        text = dedent(match[2]).strip("\n")
        # What is returned is prose; of the others, each line that is not indented begins an item.
        paragraphs = [text] if title == "Returns" else re.split(r"\n(?! |\n|\Z)", text)
        items = [_item(paragraph.rstrip(), title, path) for paragraph in paragraphs if paragraph.strip()]
        return f"**{title}**\n\n" + "\n".join(items) + "\n\n"

    return _SECTION.sub(section, text)


def _item(text: str, title: str, path: str) -> str:
    if text.startswith(">"):
        return f"\n*{' '.join(text.removeprefix('>').split())}*\n"
    if title == "Returns":
        return text + "\n"
    lines = text.split("\n")
    parameter = _PARAMETER.match(text) if title == "Parameters" else None
    if parameter is not None:
        names = "".join(f'<a id="{path}.{name.strip()}"></a>' for name in parameter[1].split(","))
        described = text[parameter.end() :].split("\n")
        lines = [f"{names}**{parameter[1]}**{parameter[2] or ''}: {described[0].strip()}".rstrip(), *described[1:]]
    lines[0] = re.sub(r"^\*\*(?=\w+:)", r"\*\*", lines[0])  # `**kwargs:`
    return "\n".join([f"- {lines[0]}", *(f"    {line.strip()}" if line.strip() else "" for line in lines[1:])])


class HuggingFaceDocstrings(griffe.Extension):
    """Rewrites all docstrings when the package has been read, so that links can be looked up among all names."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        objects = list(_objects(pkg))
        paths = [thing.path for thing in objects]
        for thing in objects:
            if thing.docstring is not None:
                text = to_markdown(thing.docstring.value, thing.path)
                thing.docstring.value = _LINK.sub(lambda link, at=thing.path: _reference(link[1], at, paths), text)
        modules = sorted((thing for thing in objects if thing.is_module and thing.docstring), key=lambda m: m.path)
        text = "\n\n".join(f"## `{module.path}`\n\n{module.docstring.value}" for module in modules)
        pkg.set_member("all_modules", griffe.Module("all_modules", docstring=griffe.Docstring(text)))


def _objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    yield parent
    for member in parent.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _reference(name: str, at: str, paths: list[str]) -> str:
    if name.startswith(_ELSEWHERE):
        return f"`{name}`"
    found = [path for path in paths if path == name or path.endswith(f".{name}")]
    if not found:
        raise LookupError(f"The docstring of {at} links to [`{name}`], and nothing in the package has that name.")
    shown = name.rpartition(".sdpo_trl.")[2].rpartition("sdpo_trl.")[2]
    return f'<autoref identifier="{found[0]}" optional><code>{shown}</code></autoref>'
