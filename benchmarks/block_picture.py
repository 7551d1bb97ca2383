"""`make readme`: what a block of GPT-2 keeps for backward, as `reference/block.svg`.

The picture of the README and of notebook 03, section 1. It has the operations of a block in two rows, and
under each tensor as many squares as numbers are kept for each number of the block's input. A test compares
them with the notebook's `KEPT`. The notebook carries it as a PNG, drawn by Chromium: on Colab there are no
files beside it, and JupyterLab shows no SVG that is attached.
"""

import base64
import io
import subprocess
import tempfile
from pathlib import Path

import nbformat
from PIL import Image

from labutils.files import REFERENCE_DIR, REPO_DIR, write_atomically
from labutils.plotting.style import CATEGORIES, INK, MUTED

TARGET = REFERENCE_DIR / "block.svg"
NOTEBOOK, ATTACHED = REPO_DIR / "03-Gradient_Checkpointing.ipynb", "block.png"
HALVES = (  # tensors with their squares, and the operation that reads each
    [
        ("the block’s input", 1, "layer norm"),
        ("norm’s output", 1, "linear"),
        ("queries, keys, values", 3, "attention"),
        ("attention’s output", 1, "linear"),
    ],
    [
        ("input", 1, "layer norm"),
        ("norm’s output", 1, "linear"),
        ("GELU’s input", 4, "GELU"),
        ("GELU’s output", 4, "linear"),
    ],
)
LEFT, SIDE, PITCH, TOP, ROW = 84, 18, 205, 96, 190  # pixels: margin, square, column, first row, row
BOX = 84, 30  # of an operation


def text(x: float, y: float, words: str, **style: str) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x}" y="{y}"{attributes}>{words}</text>'


def tensor(x: float, y: float, name: str, n: int, fill: str) -> list[str]:
    """Return `n` squares over each other, from the line down, and the name below."""
    parts = []
    for i in range(n):
        corner = f'x="{x - SIDE / 2}" y="{y + (i - 0.5) * SIDE}"'
        parts.append(
            f'<rect {corner} width="{SIDE}" height="{SIDE}" fill="{fill}" class="square"/>'
        )
    return [*parts, text(x, y + (n - 0.5) * SIDE + 19, f"{n} · {name}")]


def half(y: float, tensors: list, is_first: bool) -> list[str]:
    """Return a row: its tensors and operations, its sum, and the way around them to the sum."""
    end = LEFT + len(tensors) * PITCH
    parts = [f'<path d="M{LEFT} {y - 12} V{y - 52} H{end} V{y - 16}" class="way"/>']
    for i, (name, n, operation) in enumerate(tensors):
        x = LEFT + i * PITCH
        left = x + PITCH / 2 - BOX[0] / 2
        is_checkpoint = is_first and i == 0
        fill = CATEGORIES["parameters" if is_checkpoint else "activations"]
        parts += tensor(x, y, name, n, fill)
        parts.append(f'<path d="M{x + 14} {y} H{left - 3}" class="way"/>')
        parts.append(f'<path d="M{left + BOX[0]} {y} H{x + PITCH - 14}" class="way"/>')
        corner = f'x="{left}" y="{y - BOX[1] / 2}" width="{BOX[0]}" height="{BOX[1]}"'
        parts += [f'<rect {corner} rx="6" class="box"/>', text(left + BOX[0] / 2, y + 5, operation)]
    return [
        *parts,
        f'<circle cx="{end}" cy="{y}" r="12" class="box"/>',
        text(end, y + 6, "+", font_size="18"),
    ]


def picture() -> str:
    end, first, second = LEFT + 4 * PITCH, TOP, TOP + ROW
    join = f'<path d="M{end} {first + 13} V{first + 98} H{LEFT - 40} V{second} H{LEFT - 14}" class="way"/>'
    total = sum(n for tensors in HALVES for _, n, _ in tensors)
    numbers = " + ".join(str(n) for tensors in HALVES for _, n, _ in tensors)
    fills = CATEGORIES["parameters"], CATEGORIES["activations"]
    legend = []
    for i, words in enumerate(
        ("kept by a checkpoint", "kept without one, computed again with one")
    ):
        x = LEFT - 9 + i * 190
        square = f'<rect x="{x}" y="14" width="14" height="14" fill="{fills[i]}" class="square"/>'
        legend += [square, text(x + 21, 26, words, text_anchor="start", fill=MUTED)]
    parts = [*half(first, HALVES[0], True), join, *half(second, HALVES[1], False), *legend]
    parts.append(text(end, 26, f"{numbers} = {total}", text_anchor="end", font_weight="bold"))
    size = (
        f'viewBox="0 0 {end + 40} {second + 110}" font-size="14" text-anchor="middle" fill="{INK}"'
    )
    style = (
        f".way{{fill:none;stroke:{MUTED};stroke-width:1.3;marker-end:url(#tip)}}"
        f".box{{fill:#fff;stroke:{INK}}}.square{{stroke:#fff;stroke-width:1.5}}"
    )
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip += f'<path d="M0 0 L8 4 L0 8 Z" fill="{MUTED}"/></marker>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif">'
    title = "<title>What a block of GPT-2 keeps for the backward pass</title>"
    ground = '<rect width="100%" height="100%" rx="8" fill="#fff"/>'
    return "\n".join(
        [head, title, f"<style>{style}</style><defs>{tip}</defs>", ground, *parts, "</svg>\n"]
    )


def with_fewer_colors(png: str) -> str:
    """Return a picture, PNG in base64, with 128 colours: half the bytes, and as good to the eye."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(128)
    image.save(file := io.BytesIO(), format="png", optimize=True)
    smaller = base64.b64encode(file.getvalue()).decode()
    return min(png, smaller, key=len)


def as_png(svg: Path, width: int, height: int) -> str:
    """Return a picture of an SVG file with two dots for each of its pixels, in base64."""
    with tempfile.TemporaryDirectory() as folder:
        png = Path(folder) / "block.png"
        command = ["chromium", "--headless", "--no-sandbox", "--force-device-scale-factor=2"]
        command += [f"--window-size={width},{height}", f"--screenshot={png}", svg.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
        return with_fewer_colors(base64.b64encode(png.read_bytes()).decode())


if __name__ == "__main__":
    write_atomically(TARGET, picture().encode())
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    [cell] = [cell for cell in notebook.cells if f"(attachment:{ATTACHED})" in cell.source]
    width, height = LEFT + 4 * PITCH + 40, TOP + ROW + 110
    cell.attachments = {ATTACHED: {"image/png": as_png(TARGET, width, height)}}
    write_atomically(NOTEBOOK, (nbformat.writes(notebook) + "\n").encode())
    print(f"wrote {TARGET.name}, and attached it to {NOTEBOOK.name}")
