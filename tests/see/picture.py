"""Makes the picture of the page in the README, of a real job: `python3 -B tests/see/picture.py docs/page.png`.

Needs a built build/bin (or $PSGRAD_BIN), Debian's dataset-fashion-mnist, Chromium and Pillow.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from browser import Browser
from observed_job import ObservedJob

TRAINED_S = 45.0
WIDTH, HEIGHT = 1280, 1130
COLOURS = 64  # A quarter of the bytes of a picture of all colours.


def main() -> None:
    """Four workers, of whom one is slower and then stops."""
    flags = ["--dataset=fashion-mnist", "--model=mlp:784,128,10", "--batch_size=64", "--epochs=8", "--eval_every=1"]
    flags += ["--experiment_step_time=40ms", "--experiment_straggler=3:1.6"]
    with tempfile.TemporaryDirectory() as folder:
        job = ObservedJob(Path(folder), workers=4, servers=2, server_flags=("--lease=60s",), worker_flags=flags)
        browser = Browser(Path(folder) / "browser", WIDTH, HEIGHT)
        try:
            browser.scheme("light")
            browser.open(f"{job.pages[0]}/")
            time.sleep(TRAINED_S)  # For curves that are worth a picture.
            job.stop(3)
            browser.wait("document.body.dataset.state === 'waiting'")
            picture = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB")
        finally:
            browser.close()
            job.end()
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(sys.argv[1], optimize=True)


if __name__ == "__main__":
    main()
