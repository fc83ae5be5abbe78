"""Draws the pictures of the pages: `python docs/pictures.py` writes them to `docs/pictures/`.

In the site a picture is part of its page and takes the site's colours; shown as a file it follows
the reader's colour scheme.
"""

from __future__ import annotations

import html
import pathlib

FOLDER = pathlib.Path(__file__).parent / "pictures"
STYLE = """<style>
.mla-picture { --ink: #222; --line: #777; }
@media (prefers-color-scheme: dark) { .mla-picture { --ink: #ddd; --line: #999; } }
.mla-picture text { font: 13px system-ui, sans-serif; }
.mla-picture text { fill: var(--md-default-fg-color, var(--ink)); }
.mla-picture text.title { font-weight: bold; font-size: 15px; }
.mla-picture text.small { font-size: 11px; }
.mla-picture path { fill: none; }
.mla-picture path, .mla-picture rect { stroke: var(--md-default-fg-color--light, var(--line)); }
.mla-picture .tip { fill: var(--md-default-fg-color--light, var(--line)); stroke: none; }
.mla-picture .plain { fill: none; }
.mla-picture .latent { fill: #3f7fd6; fill-opacity: 0.3; }
.mla-picture .rope { fill: #e8842c; fill-opacity: 0.35; }
.mla-picture .weight { fill: #888; fill-opacity: 0.25; }
.mla-picture .query { fill: #9a5fc4; fill-opacity: 0.3; }
.mla-picture .expanded { fill: #d64545; fill-opacity: 0.25; }
.mla-picture .out { fill: #3d9a50; fill-opacity: 0.3; }
</style>
<defs><marker id="mla-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
 orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>"""


def text(x: float, y: float, words: str, cls: str = "", anchor: str = "middle") -> str:
    """Return one line of text."""
    kind = f' class="{cls}"' if cls else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{html.escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, cls: str, *lines: str) -> str:
    """Return a rectangle with lines of text in its middle, the first in full size."""
    first = y + height / 2 + 4.5 - 7.5 * (len(lines) - 1)
    words = [
        text(x + width / 2, first + 15 * i, line, "small" if i else "")
        for i, line in enumerate(lines)
    ]
    rect = f'<rect class="{cls}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'
    return "\n".join([rect, *words])


def arrow(*points: tuple[float, float]) -> str:
    """Return a line through points, with a tip at its end."""
    line = "L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path d="M{line}" marker-end="url(#mla-tip)"/>'


def picture(width: int, height: int, title: str, *parts: str) -> str:
    """Return a whole document."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mla-picture" {size}>'
        f"<title>{html.escape(title)}</title>"
    )
    return "\n".join([head, STYLE, *parts, "</svg>"]) + "\n"


def formulations() -> str:
    """Both ways to compute one layer's attention, side by side."""
    left = [
        text(200, 24, "expanded", "title"),
        box(10, 45, 160, 40, "latent", "kv_c  [T, L]"),
        box(185, 45, 90, 40, "rope", "k_pe  [T, R]"),
        box(290, 45, 110, 40, "query", "query  [H, P+R]"),
        arrow((90, 85), (90, 120)),
        box(10, 122, 160, 44, "weight", "kv_b_proj", "for every cached token"),
        arrow((50, 166), (50, 201)),
        arrow((130, 166), (130, 201)),
        box(10, 203, 76, 44, "expanded", "k_nope", "[T, H, P]"),
        box(94, 203, 76, 44, "expanded", "value", "[T, H, V]"),
        arrow((48, 247), (48, 287)),
        arrow((132, 247), (132, 287)),
        arrow((230, 85), (230, 287)),
        arrow((345, 85), (345, 287)),
        box(10, 289, 390, 50, "plain", "attention with keys and values per head",
            "scores P+R wide, sums V wide"),
        arrow((205, 339), (205, 449)),
        box(140, 451, 130, 40, "out", "out  [H, V]"),
    ]  # fmt: skip
    x = 450
    right = [
        text(x + 200, 24, "absorbed", "title"),
        box(x + 10, 45, 160, 40, "latent", "kv_c  [T, L]"),
        box(x + 185, 45, 90, 40, "rope", "k_pe  [T, R]"),
        box(x + 290, 45, 110, 40, "query", "query  [H, P+R]"),
        arrow((x + 345, 85), (x + 345, 120)),
        box(x + 290, 122, 110, 44, "weight", "W_UK", "for new tokens"),
        arrow((x + 345, 166), (x + 345, 201)),
        box(x + 290, 203, 110, 44, "query", "latent query", "[H, L+R]"),
        arrow((x + 345, 247), (x + 345, 287)),
        arrow((x + 90, 85), (x + 90, 287)),
        arrow((x + 230, 85), (x + 230, 287)),
        box(x + 10, 289, 390, 50, "plain", "attention to the cached rows themselves",
            "one key and value for all heads: scores L+R wide, sums L wide"),
        arrow((x + 205, 339), (x + 205, 370)),
        box(x + 140, 372, 130, 44, "weight", "W_UV", "for new tokens"),
        arrow((x + 205, 416), (x + 205, 449)),
        box(x + 140, 451, 130, 40, "out", "out  [H, V]"),
    ]  # fmt: skip
    return picture(860, 500, "Expanded and absorbed attention", *left, *right)


def cache_row() -> str:
    """One row of the cache, in bytes, for bf16 and fp8 with L = 512 and R = 64."""
    parts = []
    for y, name, size in ((40, "bf16", 2), (150, "fp8 e4m3", 1)):
        latent, row = 512 * size, 576 * size
        parts += [
            text(10, y + 26, name, anchor="start"),
            box(90, y, 560, 44, "latent", "latent", f"512 x {size} B"),
            box(650, y, 110, 44, "rope", "rope", f"64 x {size} B"),
            text(90, y + 62, "0", "small"),
            text(650, y + 62, f"{latent:,}", "small"),
            text(760, y + 62, f"{row:,} B", "small"),
        ]
    return picture(800, 225, "One row of the cache", *parts)


def slots() -> str:
    """A request of nine tokens in blocks of four."""
    table, size, blocks = (4, 1, 5), 4, 6
    cell, left = 34, 150
    parts = [text(10, 42, "tokens", anchor="start"), text(10, 122, "block_table", anchor="start")]
    parts += [text(10, 227, "kv_cache", anchor="start"), text(10, 272, "slots", anchor="start")]
    for token in range(9):
        parts.append(box(left + 60 + token * cell, 22, cell, 30, "latent", str(token)))
    for place, block in enumerate(table):
        middle = left + 60 + (place * size + (size if place < 2 else 1) / 2) * cell
        parts += [
            arrow((middle, 52), (middle, 100)),
            box(middle - 22, 102, 44, 30, "plain", str(block)),
        ]
        parts.append(arrow((middle, 132), (left + (block + 0.5) * 110 - 8, 186)))
    for block in range(blocks):
        x = left + block * 110 - 8
        parts.append(text(x + 51, 201, f"block {block}", "small"))
        for offset in range(size):
            token = table.index(block) * size + offset if block in table else 9
            kind, word = ("latent", str(token)) if token < 9 else ("plain", "")
            parts.append(box(x + offset * 25.5, 208, 25.5, 30, kind, word))
            parts.append(text(x + (offset + 0.5) * 25.5, 270, str(block * size + offset), "small"))
    return picture(820, 285, "Blocks and slots of one request", *parts)


def chunks() -> str:
    """Contexts of 6, 0, 3 and 8 tokens in a workspace of 5 rows."""
    lengths, rows = {"A": 6, "B": 0, "C": 3, "D": 8}, 5
    kinds = {"A": "latent", "C": "rope", "D": "query"}
    line = [(name, i) for name, length in lengths.items() for i in range(length)]
    cell, left = 38, 110
    parts = [text(10, 48, "contexts", anchor="start"), text(10, 163, "workspace", anchor="start")]
    for place, (name, i) in enumerate(line):
        parts.append(box(left + place * cell, 28, cell, 32, kinds[name], f"{name}{i}"))
    for chunk in range(0, len(line), rows):
        held = line[chunk : chunk + rows]
        x = left + chunk * cell + chunk / rows * 14
        parts.append(text(x + rows * cell / 2, 128, f"chunk {chunk // rows}"))
        parts.append(arrow((left + (chunk + len(held) / 2) * cell, 60), (x + rows * cell / 2, 110)))
        for row in range(rows):
            name, i = held[row] if row < len(held) else ("", 0)
            kind, word = (kinds[name], f"{name}{i}") if name else ("plain", "")
            parts.append(box(x + row * cell, 142, cell, 32, kind, word))
    return picture(930, 190, "Contexts packed into chunks", *parts)


PICTURES = {
    "formulations": formulations,
    "cache-row": cache_row,
    "slots": slots,
    "chunks": chunks,
}


def main() -> None:
    """Write every picture."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
