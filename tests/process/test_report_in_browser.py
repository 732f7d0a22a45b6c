"""The report as a real browser draws it: nothing is cut off, and the lanes have their colors."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from support.jobs import DEADLINE_S
from support.png_pixels import Pixel, rows
from support.recorded_runs import incident, kills, status, write

from msrun.report.report import write_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
HEIGHT, MARGIN = 900, 8
WHITE, TRAINING, FROZEN, LOST = (255, 255, 255), (58, 157, 93), (224, 165, 38), (167, 101, 201)


def drawn(page: Path, width: int) -> list[list[Pixel]]:
    picture = page.with_suffix(".png")
    assert BROWSER is not None
    words = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *(f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},{HEIGHT}"),
        *(f"--screenshot={picture}", page.as_uri()),
    )
    subprocess.run([BROWSER, *words], check=True, capture_output=True, timeout=DEADLINE_S)
    return rows(picture)


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [500, 1280])  # Chromium draws no window narrower than 500
def test_a_browser_shows_all_lanes_and_cuts_nothing_off(tmp_path: Path, width: int) -> None:
    lines = list(kills(4, 3, every_s=24.0))
    names = incident(0, 0, 0, 0)
    known = [
        {name: line[name] for name in names} for line in lines if line["event"] == "IncidentOver"
    ]
    run = "20260101-000000-aaaaaa"
    record = write(tmp_path, run, lines, status(run, 4, known))
    page = tmp_path / "report.html"
    write_report({"XDG_STATE_HOME": str(tmp_path)}, record, page)

    found = drawn(page, width)
    assert len(found) == HEIGHT
    assert {len(row) for row in found} == {width}
    edges = {pixel for row in found for pixel in (*row[:MARGIN], *row[-MARGIN:])}
    assert edges == {WHITE}  # what is too wide scrolls in its own box
    colors = Counter(pixel for row in found for pixel in row)
    assert colors[TRAINING] > colors[FROZEN] > colors[LOST] > 0
    lanes = [row for row in found if row.count(TRAINING) > width // 3]
    assert len(lanes) >= 4 * 10  # four lanes of fifteen pixels
