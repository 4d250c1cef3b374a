"""What every page of the project is made of: one HTML file, nothing in it from elsewhere, readable without script."""

from collections.abc import Callable, Collection, Sequence
from importlib import resources

from csc.report.svg import PHONE, WIDTH, escape, theme

__all__ = ["figure", "html_page", "html_table"]

# Columns that a phone has no room for.
_SPARE = frozenset({"train images", "test images", "FPR", "images", "epochs", "own threshold"})


def html_page(title: str, body: str, style: str = "", links: str = "") -> str:
    """A whole page around its body, with more CSS and the links of the bar above it; all HTML is well-formed XML."""
    look, script = (resources.files("csc.report").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    bar = f'<div class="bar"><nav>{links}</nav></div>' if links else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)}</title>
<style>{theme(":root")}
{look}{style}</style>
</head>
<body>
{bar}<main>
<h1>{escape(title)}</h1>
{body}
</main>
<script>//<![CDATA[
{script}//]]></script>
</body>
</html>
"""


def figure(draw: Callable[[float], str]) -> str:
    """A figure in two widths, of which a page shows the one that fits."""
    return f'<figure><div class="at-desk">{draw(WIDTH)}</div><div class="on-phone">{draw(PHONE)}</div></figure>'


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], css: str, foot: Sequence[str] = ()) -> str:
    """A table; `css` with `sortable` sorts by a click, with `study` it is a list of rows on a phone."""
    spare = {column for column, name in enumerate(head) if name in _SPARE}
    text = {column for column, name in enumerate(head) if name == "new classes"}
    names = head if "study" in css.split() else ()
    body = "\n".join(_table_row("td", row, text, spare, names) for row in rows)
    end = f"\n<tfoot>{_table_row('td', foot, spare=spare)}</tfoot>" if foot else ""
    inside = f"<thead>{_table_row('th', head, text, spare)}</thead>\n<tbody>{body}</tbody>{end}"
    return f'<div class="wide"><table class="{css}">{inside}</table></div>'


def _table_row(
    tag: str,
    cells: Sequence[str],
    text: Collection[int] = (),
    spare: Collection[int] = (),
    names: Sequence[str] = (),
) -> str:
    """Write one table row; columns in `text` are set to the left, those in `spare` are not shown on a phone.

    Where a table is a list on a phone, each cell has the name of its column.
    """
    written = []
    for column, cell in enumerate(cells):
        css = " ".join(name for name, chosen in (("text", text), ("spare", spare)) if column in chosen)
        start = f'<{tag} class="{css}"' if css else f"<{tag}"
        name = f' data-name="{escape(names[column])}"' if names else ""
        written.append(f"{start}{name}>{escape(cell)}</{tag}>")
    return f"<tr>{''.join(written)}</tr>"
