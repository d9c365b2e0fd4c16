"""From (form, family, structure) to the text of a kernel: a pure function, same input, same bytes."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from dataclasses import dataclass

import jinja2

from autoflash import keys
from autoflash.codegen.environment import environment
from autoflash.errors import ExpressionError, RenderError
from autoflash.problem import Form, Mask
from autoflash.variant import Choices, Family

# A choice that only some head dims have is made for one of them; the text is the same for all.
_HEAD_DIMS = {
    ("head_dim_tiles", "split"): "--head-dim 80",
    ("head_dim_tiles", "split_qk"): "--head-dim 192 --head-dim-v 128",
    ("head_dim_tiles", "split_v"): "--head-dim 128 --head-dim-v 80",
    ("consumer_owns", "columns"): "--head-dim 256",
}

# Python's own tokenizer takes longer than all the rest of rendering. A # in a string is no comment.
_STRING_OR_COMMENT = re.compile(r"""(?P<string>('{3}|"{3}|'|")(?:\\.|[^\\])*?\2)|#[^\n]*""", re.DOTALL)

_FOLDERS = {Family.TRITON: "triton", Family.GLUON_SM90: "gluon_sm90", Family.TORCH_TILED: "torch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedSource:
    """The text of a kernel and its identity.

    Attributes:
        form, family, structure: What it was rendered from.
        text: A Python module with a header of fixed length.
        digest: Over the text without header and comments.
        name: Of the module; contains the digest.
        template: Path of the skeleton below ``templates/``.
    """

    form: Form
    family: Family
    structure: Choices
    text: str
    digest: str
    name: str
    template: str


@functools.cache
def render(form: Form, family: Family, structure: Choices) -> RenderedSource:
    """Render the kernel module of a structure.

    Args:
        form: What is to be computed.
        family: Which templates; vendor kernels have none.
        structure: Choices of the family's catalog.

    Raises:
        RenderError: for a family without templates, a missing or unknown choice, or a template that gives no Python.
    """
    template = _template_of(form, family, structure)
    try:
        body = environment().get_template(template).render(problem=form, structure=structure)
        ast.parse(body)
        digest = source_digest(body)
        header = (
            environment()
            .get_template("common/_header.py.j2")
            .render(
                problem=form,
                structure=structure,
                template=template,
                digest=digest,
                command=_command(form, family, structure),
            )
        )
    except (jinja2.TemplateError, ExpressionError) as error:
        raise RenderError(f"{template} cannot render {family.value} [{structure}] for {form}: {error}") from error
    except SyntaxError as error:
        raise RenderError(f"{template} gives no valid Python for [{structure}] and {form}: {error}") from error
    return RenderedSource(
        form=form,
        family=family,
        structure=structure,
        text=header + body,
        digest=digest,
        name=f"{_FOLDERS[family]}_{form.op.value}_{digest}",
        template=template,
    )


def source_digest(text: str) -> str:
    """Digest of Python source without its comments and blank lines.

    Editing a comment, or the header, stales no result.
    """
    code = _STRING_OR_COMMENT.sub(lambda found: found["string"] or "", text)
    return keys.digest("\n".join(line.rstrip() for line in code.splitlines() if line.strip()))


def _command(form: Form, family: Family, structure: Choices) -> str:
    """The command line that prints this source."""
    words = ["autoflash render", f"--pass {form.op.value}", f"--family {family.value}"]
    words += ["--causal"] if form.mask is Mask.CAUSAL else []
    lines = {"score_mod": form.score_mod, "mask_mod": form.mask_mod}
    words += [f"--feature {feature.value}" for feature in form.features if feature.value not in lines]
    words += [f"--{name.replace('_', '-')} {shlex.quote(line)}" for name, line in lines.items() if line]
    words += [head_dims for (knob, choice), head_dims in _HEAD_DIMS.items() if structure.get(knob) == choice]
    return " ".join([*words, *(f"--set {setting}" for setting in str(structure).split())])


def _template_of(form: Form, family: Family, structure: Choices) -> str:
    """The skeleton: one of its own for a loop order that has one, else the skeleton of the pass."""
    if family not in _FOLDERS:
        raise RenderError(f"the {family.value} family is not generated: there is no template to render")
    folder = _FOLDERS[family]
    own = f"{folder}/{form.op.value}_{structure.get('loop_order', '')}.py.j2"
    shared = f"{folder}/{form.op.value}.py.j2"
    for path in (own, shared):
        try:
            environment().get_template(path)
        except jinja2.TemplateNotFound:
            continue
        except jinja2.TemplateError as error:
            raise RenderError(f"{path}, line {getattr(error, 'lineno', '?')}: {error}") from error
        return path
    raise RenderError(f"there is no template {shared}")
