"""How every page is made: templates that escape what they are given, pictures inside the page, whole files or none."""

from __future__ import annotations

import base64
import os
from pathlib import Path
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


def write(path: Path, content: bytes) -> Path:
    """Write a file so that a reader, or a run after a crash, sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path
