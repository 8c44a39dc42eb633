"""The page in a real browser without a network: charts drawn, nothing wider than the screen, no planted script run."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from synthetic import EFFECTS, losses, write_study

from ffnlab.study.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
NASTY = '<script>parent.pwned=1;window.pwned=1</script><img src=x onerror="window.pwned=1">' + "wide" * 20
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)"),
]

# Frames of a phone's and a laptop's width; what each holds is written into the outer page once its charts are drawn.
HARNESS = """<!doctype html><body><pre id="found"></pre><script>
const widths = [390, 1280], found = {}, started = Date.now();
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 900; frame.style.border = 0; frame.src = "report.html";
  document.body.append(frame);
  (function look() {
    const page = frame.contentDocument;
    if (!page || page.documentElement.dataset.drawn === undefined) {
      if (Date.now() - started < 60000) setTimeout(look, 100);
      return;
    }
    const drawing = box => box.querySelector("svg"), right = box => drawing(box).getBoundingClientRect().right;
    const size = element => parseFloat(frame.contentWindow.getComputedStyle(element).fontSize);
    const boxes = [...page.querySelectorAll(".vega")], root = page.documentElement;
    const button = page.querySelector(".legend button");
    button.click();
    setTimeout(() => {
      found[width] = {
        boxes: boxes.length,
        drawn: boxes.filter(b => b.querySelector("svg .mark-group path, svg .mark-group line")).length,
        marks: boxes.map(b => b.querySelectorAll("svg [class*=mark-] path").length),
        wide: boxes.filter(b => drawing(b) && right(b) > root.clientWidth + 1).length,
        scroll: root.scrollWidth, client: root.clientWidth, reported: Number(root.dataset.drawn),
        pressed: button.getAttribute("aria-pressed"),
        ground: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
        chart: page.querySelector(".vega svg").style.backgroundColor,
        pwned: Boolean(frame.contentWindow.pwned || window.pwned),
        small: [...page.querySelectorAll("p, li, td")].filter(e => size(e) < 12).length,
      };
      const all = Object.keys(found).length === widths.length;
      if (all) document.getElementById("found").textContent = JSON.stringify(found);
    }, 200);
  })();
}
</script></body>"""


def browse(folder: Path, profile: Path, dark: bool = False) -> dict:
    (folder / "harness.html").write_text(HARNESS)
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-default-apps", f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--allow-file-access-from-files", "--virtual-time-budget=90000",
        "--window-size=1400,2000", "--dump-dom", *(["--blink-settings=preferredColorScheme=0"] if dark else []),
        (folder / "harness.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    match = re.search(r'<pre id="found">(\{.*?\})</pre>', done.stdout, re.DOTALL)
    assert match, f"the page was not drawn: {done.stdout[:500]} {done.stderr[-2000:]}"
    return json.loads(match[1])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page(tmp_path, dark):
    values = losses(EFFECTS, range(6)) | {NASTY: losses({"x": 0.01}, range(6), rng_seed=9)["x"]}
    changes = {("silu", 3): {"status": "diverged"}, (NASTY, 1): {"error": NASTY}}
    folder = write_study(tmp_path / "s", values, cell_changes=changes, command="python train.py " + "a" * 200)
    write_report([folder], pictures=False)
    html = (folder / "report.html").read_text()
    assert "Content-Security-Policy" in html
    assert "default-src 'none'" in html
    for width, page in browse(folder, tmp_path / "profile", dark).items():
        # 2 forests, seeds, 4 loss curves, 9 dead maps, 6 profiles
        assert page["boxes"] == page["drawn"] == page["reported"] == 22, (width, page)
        assert min(page["marks"]) > 0, (width, page)
        assert page["scroll"] <= page["client"] <= int(width), (width, page)
        assert page["wide"] == 0, (width, page)
        assert page["pressed"] == "true"
        assert not page["pwned"]
        assert page["small"] == 0
        assert page["ground"] == page["chart"] == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
