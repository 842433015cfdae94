"""How every page is made: templates that escape what they are given, pictures inside the page."""

from __future__ import annotations

import base64
from typing import Any

from secateur.errors import SecateurError


def fill(template: str, package: str = "secateur", **content: Any) -> str:
    """A template of a package, by its path there, with everything in it escaped. Parts of ours are at hand in any."""
    try:
        import jinja2
    except ImportError as error:
        raise SecateurError("pages need jinja2.", fix="pip install 'secateur[report]'") from error
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name, "") for name in dict.fromkeys((package, "secateur"))]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["uri"] = lambda png: "data:image/png;base64," + base64.b64encode(png).decode()
    return environment.get_template(template).render(**content)
