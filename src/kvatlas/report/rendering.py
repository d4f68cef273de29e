"""Pages: a template with its style, script and data, all in the page itself, and nothing else allowed to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from kvatlas.figures import style
from kvatlas.report.escaping import embedded, policy_hash
from kvatlas.report.text import p_text
from kvatlas.report.traces import LETTERS
from kvatlas.text import visible

#: The scripts that all pages share, in their order.
SHARED = ("page.js", "cards.js", "maps.js", "charts.js", "problems.js", "motion.js", "traces.js")


def rendered(
    template: str, own: Sequence[str], data: Mapping[str, Any], package: str = "kvatlas.report", **values: Any
) -> str:
    """The HTML of a template in `web/` of a package, with the shared style and scripts and the `own` scripts."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=visible
    )
    environment.globals.update(p_text=p_text)
    environment.filters.update(points=lambda value: style.signed(100 * value))
    sheet = web_file("page.css")
    script = "\n".join([*map(web_file, SHARED), *(web_file(name, package) for name in own)])
    constants = {
        "letters": LETTERS,
        "colours": style.steps(style.VALUES),
        "costs": style.steps(style.COSTS),
        "differences": style.steps(style.DIFFERENCES),
        "lines": list(style.LINES),
    }
    return environment.from_string(web_file(template, package)).render(
        **values,
        style=Markup(sheet),
        script=Markup(script),
        style_hash=Markup(policy_hash(sheet)),
        script_hash=Markup(policy_hash(script)),
        data=Markup(embedded(constants | dict(data))),
    )


def web_file(name: str, package: str = "kvatlas.report") -> str:
    """A file of the folder `web` of a package."""
    return (resources.files(package) / "web" / name).read_text("utf-8")
