"""Take the screenshots of the docs from the newest run of a work folder: its page, MLflow, the terminal.

`make screenshots` runs it. It needs Chromium, and a work folder with a finished run (`make run`).
"""

import contextlib
import io
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent / "screenshots"
WIDE, PHONE = 1280, 390


def main(workdir: str) -> None:
    """Write all screenshots into docs/screenshots."""
    newest, compared = newest_page(workdir), Path(workdir) / "comparison.html"
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = newest.absolute().as_uri()
        shoot(browser, page, "report.png", WIDE, 1400)
        shoot(browser, page, "report-phone.png", PHONE, 844)
        if compared.is_file():  # 'csc compare' makes it
            shoot(browser, compared.absolute().as_uri(), "comparison.png", WIDE, 1500)
        drawn = terminal(workdir, newest)
        shoot(browser, drawn.as_uri(), "terminal.png", 1000, 860)
        drawn.unlink()
        with mlflow_pages(workdir) as pages:
            for name, address in pages.items():
                shoot(browser, address, f"mlflow-{name}.png", 1800, 800, seconds=8)
        browser.close()
    print(*sorted(FOLDER.glob("*.png")), sep="\n")


def newest_page(workdir: str) -> Path:
    """The page of the newest run."""
    pages = [path for path in Path(workdir).glob("*.html") if path.name != "comparison.html"]
    if not pages:
        raise SystemExit(f"{workdir}: no page of a run; 'make run' makes one")
    return max(pages, key=lambda path: path.stat().st_mtime)


def shoot(browser: Any, address: str, name: str, width: int, height: int, seconds: int = 1) -> None:
    """Open an address, wait until it has drawn itself, and keep what is seen first."""
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto(address)
    page.wait_for_timeout(1000 * seconds)
    page.screenshot(path=FOLDER / name)
    page.close()


def terminal(workdir: str, page: Path) -> Path:
    """What `csc show` prints of the run of a page, as a picture of a terminal."""
    model = re.sub(r"-seed\d+.*", "", page.stem)
    words = [sys.executable, "-m", "csc", "show", model, "--workdir", workdir]
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    console = Console(record=True, width=110, file=io.StringIO())
    console.print(Text.from_ansi(f"$ csc show {model}\n\n{shown.stdout}"))
    picture = FOLDER / "terminal.svg"
    picture.write_text(console.export_svg(title="csc"), encoding="utf-8")
    return picture.absolute()


@contextlib.contextmanager
def mlflow_pages(workdir: str) -> Iterator[dict[str, str]]:
    """The addresses of the saved pages, while `csc ui` serves them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "csc", "ui", "--workdir", workdir, "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        pages = {}
        for line in server.stdout:
            if found := re.match(r"\S+ (results|curves) +(http\S+)", line):
                pages[found[1]] = found[2]
            if line.startswith("MLflow on"):
                break
        try:
            yield pages
        finally:
            server.terminate()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "work")
