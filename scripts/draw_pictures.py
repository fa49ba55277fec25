"""Take screenshots of real report pages for README and docs, from the directory that `make demo` writes.

    make demo OUT=demo && .venv/bin/python scripts/draw_pictures.py demo        # writes docs/pictures/

Needs Chromium on the PATH. `pictures.json`, next to the pictures, records the headings of each page, which a test
compares with those of today's report.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
PAGES = {"run": ("warmup", 1200, 720), "sweep": ("sweep", 1200, 720)}
"""Picture → directory of the demo, width and height in CSS pixels from the top of its page."""
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def read_headings(page: Path) -> list[str]:
    """Return the titles of a page's sections, in order."""
    matches = re.findall(r"<h3[^>]*>(.*?)</h3>", page.read_text(encoding="utf-8"), flags=re.S)
    return [" ".join(html.unescape(re.sub(r"<[^>]+>", "", text)).split()) for text in matches]


def save_screenshot(page: Path, picture: Path, width: int, height: int) -> None:
    """Save the top of `page` as a PNG, at 1.5 pixels per CSS pixel. Raises SystemExit without a browser."""
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(_BROWSERS)} is on the PATH")
    with tempfile.TemporaryDirectory() as profile:
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"]
        words += ["--no-first-run", f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        words += ["--force-device-scale-factor=1.5", f"--screenshot={picture}", page.resolve().as_uri()]
        subprocess.run([browser, *words], check=True, capture_output=True, timeout=120)


def main(demo: Path) -> None:
    """Draw every picture and record the headings shown."""
    PICTURES.mkdir(exist_ok=True)
    shown = {}
    for name, (folder, width, height) in PAGES.items():
        page = demo / folder / "report.html"
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / "report.html"  # copied, so that its command names no path of this machine
            text = page.read_text(encoding="utf-8").replace(str(demo.resolve()), demo.name)
            copy.write_text(text.replace(str(demo), demo.name), encoding="utf-8")
            save_screenshot(copy, PICTURES / f"{name}.png", width, height)
        shown[name] = read_headings(page)
        print(PICTURES / f"{name}.png")
    (PICTURES / "pictures.json").write_text(json.dumps(shown, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
