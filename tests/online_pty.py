"""The app in a real pseudo-terminal, its screen as text and as a picture.

    python tests/online_pty.py docs/online.png

plays a short session with the tiny model of `online_model.py` and makes the picture (needs chromium).
"""

import fcntl
import html
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import pyte

ROOT = Path(__file__).parent.parent
COLOURS = {
    "default": "#d8dee9", "black": "#3b4252", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b",
    "blue": "#61afef", "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#e5e9f0",
}  # fmt: skip
BACKGROUND = "#1e222a"


class _Screen(pyte.HistoryScreen):
    """Answers what a terminal answers, such as where the cursor is."""

    def __init__(self, columns: int, lines: int, answer) -> None:
        super().__init__(columns, lines, history=5000)
        self._answer = answer

    def write_process_input(self, data: str) -> None:
        self._answer(data.encode())


class Terminal:
    """
    A program in a pseudo-terminal of its own.

    Args:
        command (`list[str]`): The program.
        folder (`Path`): Where it runs.
        columns, lines (`int`): Of the screen.
        environment (`dict`): What is added to this process's.
    """

    def __init__(self, command, folder, columns=100, lines=34, **environment):
        self.raw = b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen = _Screen(columns, lines, lambda data: os.write(self._master, data))
        self._stream = pyte.ByteStream(self.screen)
        fixed = {"TERM": "xterm-256color", "COLORTERM": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        paths = {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, cwd=folder, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, **fixed, **paths, **environment},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)

    def text(self) -> str:
        """What can be seen, and what has scrolled away."""
        rows = [*self.screen.history.top, *(self.screen.buffer[i] for i in range(self.screen.lines))]
        shown = ["".join(row[i].data for i in range(self.screen.columns)).rstrip() for row in rows]
        return "\n".join(shown).rstrip()

    def read(self, seconds: float) -> None:
        """Take in what the program writes within this time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self._master], [], [], left)[0]:
                return
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # the program has ended
                return
            self.raw += data
            self._stream.feed(data)

    def until(self, words: str, after: int = 0, seconds: float = 120) -> int:
        """
        Wait for words on the screen, from a place in its text on.

        Returns:
            The place behind them.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.text().find(words, after)
            if found >= 0:
                return found + len(words)
            if self.process.poll() is not None:
                self.read(0.2)
                found = self.text().find(words, after)
                if found >= 0:
                    return found + len(words)
                break
            self.read(0.1)
        raise AssertionError(f"{words!r} is not on the screen after {after}:\n{self.text()}")

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)

    def page(self) -> str:
        """What can be seen, as HTML."""
        rows = []
        for number in range(self.screen.lines):
            cells = [self.screen.buffer[number][column] for column in range(self.screen.columns)]
            rows.append("".join(_cell(cell) for cell in cells))
        size = f"width:{self.screen.columns}ch;height:{self.screen.lines * 1.3}em"
        style = f"background:{BACKGROUND};margin:0;padding:12px;font:15px/1.3 'DejaVu Sans Mono',monospace;{size}"
        return f"<meta charset=utf-8><body style='margin:0'><pre style=\"{style}\">{chr(10).join(rows)}</pre>"

    def picture(self, file: Path) -> None:
        """What can be seen, as a PNG, by headless chromium."""
        width, height = int(self.screen.columns * 9.04) + 24, int(self.screen.lines * 19.5) + 24
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "screen.html"
            page.write_text(self.page(), encoding="utf-8")
            subprocess.run(
                ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--log-level=3",
                 f"--user-data-dir={folder}/profile", f"--window-size={width},{height}", f"--screenshot={file}",
                 f"file://{page}"], check=True, capture_output=True, timeout=120,
            )  # fmt: skip


def _colour(name: str) -> str:
    return COLOURS.get(name, f"#{name}" if len(name) == 6 else COLOURS["default"])


def _cell(cell) -> str:
    fore = _colour(cell.fg)
    back = BACKGROUND if cell.bg == "default" else _colour(cell.bg)
    if cell.reverse:
        fore, back = back, fore
    weight = ";font-weight:bold" if cell.bold else ""
    return f"<span style='color:{fore};background:{back}{weight}'>{html.escape(cell.data)}</span>"


def start(model: Path, work: Path, *options: str, lines: int = 34, **environment) -> Terminal:
    """The app with a model, in a working folder."""
    command = [sys.executable, "-m", "sdpo_trl.online", "--model", str(model), "--learning_rate", "0.003"]
    return Terminal([*command, "--temperature", "0.5", *options], work, lines=lines, **environment)


def main(file: str) -> None:
    import online_model

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        (work / "notes.txt").write_text("one\ntwo\nthree\n")
        online_model.save_model(Path(folder) / "habit", work)
        terminal = start(Path("../habit"), work, lines=37)
        try:
            terminal.until("you >")
            terminal.type(f"{online_model.ASKED}\r")
            place = terminal.until("y/n/e >")
            terminal.type(f"n {online_model.CORRECTION}\r")
            terminal.until("y/n/e >", terminal.until("learned: update 1", place))
            terminal.read(1)
            terminal.picture(Path(file).resolve())
            print(terminal.text())
        finally:
            terminal.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
