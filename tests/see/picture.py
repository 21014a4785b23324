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

TRAINED_S = 40.0
WIDTH, HEIGHT = 1200, 1450
COLOURS = 200
PAUSED_S = 0.06  # The slow worker computes half of the time.


def main() -> None:
    """Four workers, of whom one is slower and then stops."""
    flags = [
        "--dataset=fashion-mnist",
        "--model=mlp:784,256,128,10",
        "--batch_size=64",
        "--epochs=20",
        "--eval_every=1",
    ]
    with tempfile.TemporaryDirectory() as folder:
        server_flags = (
            "--lease=60s",
            "--optimizer=momentum",
            "--learning_rate=0.02",
            f"--checkpoint_dir={folder}/checkpoints",
        )
        job = ObservedJob(Path(folder), workers=4, servers=2, server_flags=server_flags, worker_flags=flags)
        browser = Browser(Path(folder) / "browser", WIDTH, HEIGHT)
        try:
            browser.scheme("light")
            browser.open(f"{job.pages[0]}/")
            deadline = time.monotonic() + TRAINED_S  # For curves that are worth a picture.
            while time.monotonic() < deadline:
                job.stop(3)
                time.sleep(PAUSED_S)
                job.go_on(3)
                time.sleep(PAUSED_S)
            job.stop(3)
            browser.wait("document.body.dataset.state === 'waiting'")
            picture = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB")
        finally:
            browser.close()
            job.end()
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(sys.argv[1], optimize=True)


if __name__ == "__main__":
    main()
