"""report.html: one file that opens offline, light or dark as the reader's system is."""

from __future__ import annotations

from html import escape

from content import Section
from palette import DARK, LIGHT
from tables import Table

_STYLE = """
*{box-sizing:border-box}
body{margin:0 auto;padding:1.2rem clamp(.8rem,3vw,2.5rem) 4rem;max-width:90rem;
background:var(--surface);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:break-word}
h1{font-size:1.7rem;line-height:1.2;margin:.6rem 0 .4rem}
h2{font-size:1.25rem;margin:2.4rem 0 .6rem;padding-top:.8rem;border-top:1px solid var(--grid)}
h3{font-size:1rem;margin:1.4rem 0 .4rem}
p,ul{max-width:48rem;margin:.5rem 0}
ul{padding-left:1.2rem}
li{margin:.2rem 0}
nav{display:flex;flex-wrap:wrap;gap:.3rem .9rem;font-size:.9rem;margin:.8rem 0}
a{color:var(--ssp)}
.quiet{color:var(--quiet);font-size:.88rem}
.note{border-left:3px solid var(--wait);padding-left:.7rem}
.wide{overflow-x:auto;margin:.3rem 0 1rem}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:.32rem .7rem;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th{color:var(--quiet);font-weight:600;vertical-align:bottom}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--surface)}
.figures{display:grid;gap:1.2rem 1.6rem;align-items:start;
grid-template-columns:repeat(auto-fill,minmax(min(100%,24rem),1fr))}
figure{margin:0;min-width:0;max-width:36rem}
figure svg{display:block;width:100%;height:auto}
figcaption{font-size:.82rem;color:var(--quiet);line-height:1.4;margin-top:.3rem}
figcaption .from{display:block;margin-top:.2rem;font-size:.76rem}
"""


def page(title: str, lead: str, sections: list[Section], provenance: str, svgs: dict[str, str]) -> str:
    """The whole file; `svgs` by the figures' names, empty where nothing could be drawn."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>{_variables(LIGHT)}@media (prefers-color-scheme: dark){{{_variables(DARK)}}}{_STYLE}</style>",
            "</head>",
            "<body>",
            f"<h1>{escape(title)}</h1>",
            f"<p>{escape(lead)}</p>",
            f'<p class="quiet">{escape(provenance)}</p>',
            _contents(sections),
            *(_section(number, section, provenance, svgs) for number, section in enumerate(sections)),
            "</body>",
            "</html>",
            "",
        ]
    )


def _variables(colours: dict[str, str]) -> str:
    return ":root{" + "".join(f"--{name}:{value};" for name, value in colours.items()) + "}"


def _contents(sections: list[Section]) -> str:
    links = [f'<a href="#s{number}">{escape(section.title)}</a>' for number, section in enumerate(sections)]
    return f"<nav>{''.join(links)}</nav>"


def _section(number: int, section: Section, provenance: str, svgs: dict[str, str]) -> str:
    parts = [f'<section id="s{number}">', f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(paragraph)}</p>" for paragraph in section.paragraphs]
    if section.bullets:
        parts.append("<ul>" + "".join(f"<li>{escape(bullet)}</li>" for bullet in section.bullets) + "</ul>")
    for caption, table in section.tables:
        parts += [f"<h3>{escape(caption)}</h3>"] * bool(caption) + [_table(table)]
    figures = [figure for figure in section.figures if figure.name in svgs]
    if figures:
        parts.append('<div class="figures">')
        for figure in figures:
            caption = f'{escape(figure.caption)}<span class="from">{escape(provenance)}</span>'
            parts.append(f"<figure>{svgs[figure.name]}<figcaption>{caption}</figcaption></figure>")
        parts.append("</div>")
    parts += [f'<p class="note">{escape(note)}</p>' for note in section.notes]
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
