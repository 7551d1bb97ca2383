"""The site: `make site`. Notebooks as they are committed, or with RUNS=runs as `labs` left them."""

import json
import math
import os
import re
import tomllib
from pathlib import Path

import pandas as pd
from docutils import nodes
from latex2mathml.converter import convert
from sphinx.addnodes import pending_xref

from labutils.course.exhibits import play

ROOT = Path(__file__).parents[1]
ABOUT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = ABOUT.get("urls", {}).get("Repository", "")
NOTEBOOKS = {
    p.stem: p for p in sorted(ROOT.glob("0*.ipynb")) + sorted(ROOT.glob("further/*.ipynb"))
}
CARDS = sorted(ROOT.glob("benchmarks/cards/*/"))  # each with notebooks that ran there
STEPS = r"(Guess|Predict|Measure|Reconcile|Explain|Try it|What you now know|What to see)\b"
FOR_EVERYBODY = {  # what is empty is no header; what scrolls is reached by keyboard; names are read
    "<th></th>": "<td></td>",
    '<table border="1" class="dataframe">': '<table class="dataframe" tabindex="0">',
    '<div class="highlight"><pre>': '<div class="highlight"><pre tabindex="0">',
    ' aria-label="Toggle hidden content"': "",
}
# exhibits in the order of the questions that people bring
PLAY = ["plan", "step", "loss_scale", "number", "allocator", "segments", "window", "amdahl"]
PLAY += ["seeds", "allreduce"]

project = "Training optimisation on one GPU"
extensions = ["myst_nb", "sphinx.ext.githubpages"]
root_doc = "docs/contents"
documents = ["README.md", "INSTRUCTORS.md", "labutils/README.md", "docs/*.md"]
include_patterns = ["*.ipynb", "further/*.ipynb", "benchmarks/cards/*/*.ipynb", *documents]
nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = "The code of this figure"
nb_code_prompt_hide = "The code of this figure"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header", "toc.not_included"]
templates_path = ["."]
html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["custom.css"]
html_css_files = ["custom.css"]
html_favicon = "favicon.svg"
html_additional_pages = {"index": "first.html"}
html_copy_source = False
html_math_renderer = "mathml"
html_theme_options = {
    "show_toc_level": 2,
    "footer_content_items": ["last-updated.html", "extra-footer.html"],
    "logo": {"text": project},
    "article_header_start": ["toggle-primary-sidebar.html", "switch.html"],
    "repository_url": REPOSITORY,
    "use_repository_button": bool(REPOSITORY),
    "use_issues_button": bool(REPOSITORY),
    "launch_buttons": {"colab_url": "https://colab.research.google.com"} if REPOSITORY else {},
}


def read_source(app, name, source):
    """Take a notebook from RUNS, if it was executed there; attached pictures become data; and links
    of a notebook that ran on a card lead where they lead from its place in the course.
    """
    place, stem = (ROOT / name).parent, Path(name).name
    is_of_card = name.startswith("benchmarks")
    own = Path(os.environ.get("RUNS") or "/nowhere", f"{stem}.ipynb")
    if own.exists() and not is_of_card:
        source[0] = own.read_text(encoding="utf-8")
    if stem not in NOTEBOOKS:
        return

    def from_here(link):
        file = (NOTEBOOKS[stem].parent / link[1]).resolve()
        if not is_of_card or (place / file.name).exists() or not file.exists():
            return link[0]
        return f"]({Path(os.path.relpath(file, place)).as_posix()})"

    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        for file, kinds in cell.get("attachments", {}).items():
            ((kind, data),) = kinds.items()
            text = text.replace(f"attachment:{file}", f"data:{kind};base64,{''.join(data).strip()}")
        for output in cell.get("outputs", []):  # what a figure says to those who do not see it
            if alt := output.get("metadata", {}).get("image/png", {}).get("alt"):
                cell["metadata"]["mystnb"] = {"image": {"alt": alt}}
        if cell["cell_type"] == "markdown":
            cell["source"] = re.sub(r"\]\(([^()#:]+)\)", from_here, text)
    source[0] = json.dumps(notebook)


def mark(app, document):
    """Give a paragraph that begins with a step of the course, such as Guess, a class for its style;
    lead a link to a folder of the course to the repository, if it has an address.
    """
    for paragraph in document.findall(nodes.paragraph):
        first = next((child for child in paragraph.children if child.astext()), None)
        if isinstance(first, nodes.strong) and (word := re.match(STEPS, first.astext())):
            paragraph["classes"] += ["step", word[1].lower().replace(" ", "-")]
    place = (ROOT / app.env.docname).parent
    for link in list(document.findall(pending_xref)):
        folder = (place / link["reftarget"]).resolve()
        if folder.is_dir():
            address = f"{REPOSITORY}/tree/main/{folder.relative_to(ROOT).as_posix()}"
            words = nodes.reference("", "", refuri=address) if REPOSITORY else nodes.inline()
            words += link.children
            link.replace_self(words)


def add_facts(app, page, template, context, document):
    """Give the first page its facts, and a notebook the links to what other machines printed."""
    for old, new in FOR_EVERYBODY.items():
        context["body"] = context.get("body", "").replace(old, new)
    context["theme_logo_link"] = context["pathto"]("index")
    if page == "index":
        context |= first_page()
    stem = page.rpartition("/")[2]
    if stem in NOTEBOOKS:
        sentence = json.loads(NOTEBOOKS[stem].read_text(encoding="utf-8"))["metadata"]["about"]
        context["metatags"] += f'\n<meta name="description" content="{sentence}">'
        machines = {"CPU": NOTEBOOKS[stem].relative_to(ROOT).with_suffix("").as_posix()}
        for card in CARDS:
            if (card / f"{stem}.ipynb").exists():
                machines[card.name.upper()] = f"benchmarks/cards/{card.name}/{stem}"
        context["machines"] = machines if len(machines) > 1 else {}


def place(speed):
    """Return where a speed stands in the first page's picture: its axis is logarithmic."""
    return round(210 + 84 * math.log2(speed))


def first_page():
    """Return what the first page says: a card for each notebook, and 16 bits against the claim."""
    cards = []
    for path in sorted(ROOT.glob("0*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        title = "".join(notebook["cells"][0]["source"]).splitlines()[0].lstrip("# ")
        cards.append(notebook["metadata"] | {"title": title, "page": path.stem})
    table = pd.read_csv(ROOT / "labutils" / "reference" / "precisions_on_cards.csv")
    bars = []
    for card, steps in table.groupby("card", sort=False):
        measured = steps.measured.notna().any()
        ms = steps.measured if measured else steps.predicted
        for precision, speed in zip(steps.precision[1:], ms.iloc[0] / ms[1:], strict=True):
            left, right = sorted([place(1), place(speed)])
            bar = {"name": f"{card}, {precision.upper()}", "precision": precision}
            bar |= {"left": left, "width": right - left, "speed": f"{speed:.2g}"}
            bars.append(bar | {"measured": measured, "says": f"{bar['name']} {speed:.2g}"})
    facts = {"cards": cards, "bars": bars, "repository": REPOSITORY, "licence": ABOUT["license"]}
    facts |= {"claim": (place(2), place(3)), "one": place(1), "height": 34 * len(bars)}
    facts["exhibits"] = {name: getattr(play, name)() for name in PLAY[:8]}
    pictures = {
        name: re.search(r'src="(data:[^"]+)"', it.html) for name, it in facts["exhibits"].items()
    }
    facts["stills"] = {name: found[1] for name, found in pictures.items()}
    # the README's table of optional notebooks: | 01 | [title](further/name.ipynb), … |
    rows = re.findall(
        r"^\| (0\d) \| (.*further/.*) \|$", (ROOT / "README.md").read_text("utf-8"), re.M
    )
    links = {after: re.findall(r"\[([^\]]+)\]\((further/\w+)\.ipynb", row) for after, row in rows}
    facts["further"] = {
        after: [(page, title) for title, page in row] for after, row in links.items()
    }
    return facts


def write_exhibits(app, exception):
    """Write the page of all exhibits, which is no part of a document."""
    if not exception:
        play.write_page(Path(app.outdir), PLAY, ' <a href="index.html">The course</a>')


def setup(app):
    """Tell Sphinx of these; formulas become MathML, which browsers draw themselves."""
    app.connect("source-read", read_source)
    app.connect("doctree-read", mark)
    app.connect("html-page-context", add_facts)
    app.connect("build-finished", write_exhibits)

    def inline(writer, node):
        writer.body.append(convert(node.astext()))
        raise nodes.SkipNode

    def block(writer, node):
        formula = convert(node.astext(), display="block")
        writer.body.append(formula.replace("<math ", '<math tabindex="0" ', 1))
        raise nodes.SkipNode

    app.add_html_math_renderer("mathml", (inline, None), (block, None))
