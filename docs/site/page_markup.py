"""Change the pages on their way into the web site, so that they guide a reader there. On a forge they stay as written.

- Commands for a cluster and for a laptop that follow each other become two tabs.
- The README's map becomes the navigation, with the groups and times of the map. A dot marks the afternoon's sections.
- Tables and code get the markup with which site.css makes them readable on a narrow screen.
- Figures become part of the page, so that they have its colours in light and in dark mode. Of a <picture> with a light
  and a dark image, the page shows the one of its mode.
"""

import html
import itertools
import re
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]

COMMANDS = r" *```{language}\n(?:(?!```).)*```"
CLUSTER, LAPTOP = COMMANDS.format(language="bash cluster"), COMMANDS.format(language="bash")
CLUSTER_AND_LAPTOP = re.compile(
    rf"^( *)((?: *(?:On a cluster[^\n]*|Self-study):\n\n{CLUSTER}\n\n)+) *(On a laptop[^\n]*:\n\n{LAPTOP})$",
    re.MULTILINE | re.DOTALL,
)
PICTURE = re.compile(r'<picture>\s*<source [^>]*srcset="(.*?)">\s*<img alt="(.*?)" src="(.*?)".*?</picture>', re.DOTALL)
LIGHT_AND_DARK = r"""```{image} \3
:alt: \2
:class: only-light
```

```{image} \1
:alt: \2
:class: only-dark
```"""
ROW_TO_FILL_IN = re.compile(
    r"<tr[^>]*>\s*<td[^>]*><p>(?!</p>)(?:(?!</td>).)*</td>(\s*<td[^>]*><p></p></td>)+\s*</tr>", re.DOTALL
)
# Words that people search for, and the heading under which they find the answer
SEARCH_WORDS = {
    ("docs/troubleshooting", "## Out of memory"): ["out of memory"],
    ("README", "## Your own model and data"): ["csv", "ask a question"],
}


DOT = '<span class="afternoon" role="img" aria-label="afternoon" title="afternoon">●</span>'
DOT_EXPLAINED = '<p class="legend"><span class="afternoon" aria-hidden="true">●</span> sections of the afternoon</p>'


def make_tabs(source: str) -> str:
    """Turn each pair of "On a cluster:" and "On a laptop:" with their commands into synchronised tabs."""

    def tabs(pair: re.Match) -> str:
        indent, cluster, laptop = pair.groups()
        lines = ["::::{tab-set}", ":sync-group: machine"]
        for name, text in (("Cluster", cluster), ("Laptop", laptop)):
            said = text.strip().removeprefix(f"On a {name.lower()}:\n\n")
            lines += [f":::{{tab-item}} {name}", f":sync: {name.lower()}", "", said, ":::"]
        return "\n".join(indent + line.removeprefix(indent) for line in "\n".join([*lines, "::::"]).splitlines())

    return CLUSTER_AND_LAPTOP.sub(tabs, source)


def change_source(app, page: str, source: list[str]) -> None:
    source[0] = make_tabs(source[0])
    # site.css marks the commands that only a cluster can run
    source[0] = re.sub(r"^( *)```bash cluster$", r"\1{.cluster}\n\g<0>", source[0], flags=re.MULTILINE)
    source[0] = PICTURE.sub(LIGHT_AND_DARK, source[0])
    for (searched_page, heading), words in SEARCH_WORDS.items():
        if page == searched_page:
            entries = ", ".join(f"! {word}" for word in words)
            source[0] = source[0].replace(f"\n{heading}\n", f"\n{heading}\n\n```{{index}} {entries}\n```\n", 1)
    if page == app.config.root_doc:
        source[0] += navigation()


def navigation() -> str:
    """Return the navigation: the map in README.md with its groups, then the pages of the line after the map."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    text = readme.split("## The workshop")[1].split("## Your own model")[0]
    workshop_map, reference = text.split("Reference pages:")
    agendas = yaml.safe_load((REPOSITORY / "experiments" / "agendas.yaml").read_text(encoding="utf-8"))["agendas"]
    afternoon = {f"docs/{row['page']}" for row in agendas["afternoon"]["rows"] if "page" in row}
    groups = {"Begin": ["Two commands, first steps <README>"]}
    for number, name, time in re.findall(r"^\| *(\d*) *\| (.*?) \| (.*?) \|", workshop_map, re.MULTILINE):
        if group := re.fullmatch(r"\*\*(.*)\*\*", name):
            pages = groups[group[1]] = []
        elif link := re.fullmatch(r"\[(.*)\]\((.*)\.md\)", name):
            mark = ", afternoon" if link[2] in afternoon else ""
            pages.append(f"{number and number + '. '}{link[1]} ({time}{mark}) <{link[2]}>")
    groups["Reference"] = [*dict.fromkeys(re.findall(r"\]\(([\w/-]+)\.md", reference))]
    groups["For instructors"] = [
        f"docs/instructor/{name}" for name in ("README", "day", "own-copy", "sheet", "message")
    ]
    groups["About"] = ["CONTRIBUTING", "CHANGELOG", "data/README"]
    return "".join(
        f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
        for caption, pages in groups.items()
    )


def change_html(app, page: str, template: str, context: dict, doctree) -> None:
    body = context.get("body", "")
    body = re.sub(r'<table class="docutils.*?</table>', prepare_table, body, flags=re.DOTALL)
    body = re.sub(r"<pre><span></span>(.*?)</pre>", wrap_lines, body, flags=re.DOTALL)
    # The link to the next page is below the last card, not in it
    body = re.sub(r"(<p>Next: (?:(?!</p>).)*</p>)\s*</section>", r"</section>\1", body, flags=re.DOTALL)
    # Mark flags, because a browser breaks lines after the dashes in them
    flag = r'<span class="flag">\g<0></span>'
    code = r"<(pre|code)\b.*?</\1>"
    body = re.sub(code, lambda found: re.sub("--[A-Za-z0-9-]+", flag, found[0]), body, flags=re.DOTALL)
    context["body"] = re.sub(r'<img alt="([^"]*)" src="[^"]*_images/([\w-]+)\.svg" />', insert_figure, body)
    context["furo_navigation_tree"] = mark_times(context.get("furo_navigation_tree", ""))


def mark_times(tree: str) -> str:
    """Give the times in the navigation a class, and the sections of the afternoon a dot. Explain the dot above them."""
    tree = re.sub(r" \((\d+ min)\)</a>", r' <span class="time">\1</span></a>', tree)
    tree = re.sub(r" \((\d+ min), afternoon\)</a>", rf' <span class="time">{DOT} \1</span></a>', tree)
    return tree.replace("</ul>", f"</ul>{DOT_EXPLAINED}", 1)


def prepare_table(table: re.Match) -> str:
    """Allow line breaks inside long names, but not inside times. Drop an empty head.

    If there are many columns, add the head to each cell, and mark a table to fill in.
    """
    text = re.sub(r"<code.*?</code>", lambda code: re.sub(r"(?<=\w)[_/.](?=\w)", r"\g<0><wbr>", code[0]), table[0])
    text = re.sub(r"(?<=\d) (?=min\b)", "&nbsp;", text)
    heads = [html.unescape(re.sub("<.*?>", "", head)).strip() for head in re.findall(r"<th\b.*?</th>", text, re.DOTALL)]
    if not any(heads):
        return re.sub("<thead>.*?</thead>", "", text, flags=re.DOTALL).replace('class="', 'class="facts ', 1)
    is_to_fill_in = bool(ROW_TO_FILL_IN.search(text))
    if len(heads) < (4 if is_to_fill_in else 5) or "Afternoon" in heads:  # the map has short cells
        return text
    labels = itertools.cycle(map(html.escape, heads))
    text = re.sub("<td", lambda _: f'<td data-label="{next(labels)}"', text)
    kind = "many-columns fill-in " if is_to_fill_in else "many-columns "
    return text.replace('class="', f'class="{kind}', 1)


def insert_figure(image: re.Match) -> str:
    """Return the SVG element of a figure. Its ids begin with the figure's name, because a page may have two figures."""
    description, name = image.groups()
    file = (REPOSITORY / "docs" / "figures" / f"{name}.svg").read_text(encoding="utf-8")
    svg = file[file.index("<svg") :].replace("<svg ", f'<svg class="figure" role="img" aria-label="{description}" ', 1)
    svg = re.sub("<metadata>.*?</metadata>|<style>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    return re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)


def wrap_lines(block: re.Match) -> str:
    lines = block[1].splitlines(keepends=True)
    return "<pre>" + "".join(f'<span class="line">{line}</span>' for line in lines) + "</pre>"


def setup(app) -> None:
    app.connect("source-read", change_source)
    app.connect("html-page-context", change_html, priority=900)  # after the theme has made the navigation
