"""Draw `baton demo` as an SVG: both loss curves, the kills, both digests.

`baton demo --json > demo.json && python -m tools.demo_picture demo.json docs/pictures/demo.svg`
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 600, 350
LEFT, RIGHT, TOP, BOTTOM = 52, 568, 72, 252  # of the plot
SECONDS = 6.0  # the killed run is drawn once, in this time
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #24292f }
.small { font-size: 12px; fill: #57606a }
.digest { font: 13px ui-monospace, monospace }
.equal { font-weight: 600; fill: #1a7f37 }
.card { fill: #ffffff; stroke: #d0d7de }
.axis { stroke: #d0d7de }
.plain { stroke: #a5c8f5; stroke-width: 7; fill: none; stroke-linecap: round; stroke-linejoin: round }
.killed { stroke: #0550ae; stroke-width: 2; fill: none }
.kill { stroke: #cf222e; stroke-dasharray: 3 3 }
.cross { fill: #cf222e; font-weight: 700 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .card { fill: #0d1117; stroke: #3d444d } .axis { stroke: #3d444d }
  .plain { stroke: #1f4f8f } .killed { stroke: #79c0ff } .equal { fill: #3fb950 }
  .kill { stroke: #ff7b72 } .cross { fill: #ff7b72 }
}
""".strip()


def draw(demo: dict[str, Any]) -> str:
    """Return the picture of a demo's `--json`."""
    first, second = demo["proof"]["variants"]
    kills = [(kill["step"], kill["resumed"]) for kill in demo["kills"]]
    low, high = min(first["losses"]), max(first["losses"])
    steps = max(len(first["losses"]), len(second["losses"]))

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * (step - 1) / max(1, steps - 1)

    def line(losses: Sequence[float]) -> str:
        share = [(high - loss) / ((high - low) or 1) for loss in losses]
        return " ".join(f"{x(step):.1f},{TOP + (BOTTOM - TOP) * down:.1f}" for step, down in enumerate(share, 1))

    stops = [1, *(step for kill in kills for step in kill), steps]
    distances = [abs(after - before) for before, after in itertools.pairwise(stops)]
    times = [sum(distances[:end]) / sum(distances) for end in range(len(stops))]
    widths = ";".join(f"{x(stop) - LEFT + 2:.1f}" for stop in stops)
    marks = []
    for step, resumed in kills:
        marks += [
            f'<line class="kill" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{TOP - 8}" y2="{BOTTOM}"/>',
            f'<text class="cross" x="{x(step):.1f}" y="{TOP - 14}" text-anchor="middle">✗ kill -9</text>',
            f'<text class="small" x="{x(step):.1f}" y="{BOTTOM + 18}" text-anchor="middle">'
            f"step {step}, resumed at {resumed}</text>",
        ]
    is_equal = first["state_digest"] == second["state_digest"]
    end = "identical ✓" if is_equal else "different ✗"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="Loss of an undisturbed run and of one killed three times">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        f'<text x="{LEFT}" y="26">Training loss of {model_name(demo)}, {steps} steps</text>',
        f'<text class="small" x="{LEFT - 8}" y="{TOP + 4}" text-anchor="end">{high:.2f}</text>',
        f'<text class="small" x="{LEFT - 8}" y="{BOTTOM + 4}" text-anchor="end">{low:.2f}</text>',
        f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>',
        f'<polyline class="plain" points="{line(first["losses"])}"/>',
        f'<clipPath id="now"><rect x="{LEFT - 2}" y="0" width="{RIGHT - LEFT + 4}" height="{HEIGHT}">',
        f'<animate attributeName="width" values="{widths}" keyTimes="{";".join(f"{time:.3f}" for time in times)}" '
        f'dur="{SECONDS}s" fill="freeze"/></rect></clipPath>',
        f'<polyline class="killed" clip-path="url(#now)" points="{line(second["losses"])}"/>',
        *marks,
        f'<line class="plain" x1="{LEFT}" x2="{LEFT + 24}" y1="{HEIGHT - 52}" y2="{HEIGHT - 52}"/>',
        f'<text x="{LEFT + 36}" y="{HEIGHT - 48}">undisturbed</text>',
        f'<text class="digest" x="{LEFT + 134}" y="{HEIGHT - 48}">{first["state_digest"][:32]}…</text>',
        f'<line class="killed" x1="{LEFT}" x2="{LEFT + 24}" y1="{HEIGHT - 28}" y2="{HEIGHT - 28}"/>',
        f'<text x="{LEFT + 36}" y="{HEIGHT - 24}">killed</text>',
        f'<text class="digest" x="{LEFT + 134}" y="{HEIGHT - 24}">{second["state_digest"][:32]}…</text>',
        f'<text class="equal" x="{RIGHT}" y="{HEIGHT - 36}" text-anchor="end">{end}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def model_name(demo: dict[str, Any]) -> str:
    """Return the name of the demo's model, as a reader knows it."""
    return "SmolLM2-135M-Instruct" if "smollm2" in str(demo["model"]) else "a small model"


if __name__ == "__main__":
    source, target = sys.argv[1:]
    Path(target).write_text(draw(json.loads(Path(source).read_text(encoding="utf-8"))), encoding="utf-8")
