"""The one Jinja environment: strict, without surprises in white space, blind to everything but its two nouns."""

from __future__ import annotations

import functools
from typing import NoReturn

import jinja2

from autoflash import paths
from autoflash.codegen.expressions import expressions
from autoflash.errors import RenderError


def fail(message: str) -> NoReturn:
    """End of every choice in a template: the form asked for does not exist.

    Raises:
        RenderError: always.
    """
    raise RenderError(message)


@functools.cache
def environment() -> jinja2.Environment:
    """The environment that every template is rendered in.

    Templates see ``problem`` (a :class:`~autoflash.problem.Form`), ``structure``
    (:class:`~autoflash.variant.Choices`), ``fail`` and ``expressions``; the header also sees its own fields.
    """
    created = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.templates_dir()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Python source, not HTML
    )
    created.globals["fail"] = fail
    created.globals["expressions"] = expressions
    return created
