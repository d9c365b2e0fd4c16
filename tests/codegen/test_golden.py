"""A few rendered kernels in full, so that a change of a template is reviewed as the change of a kernel.

``python -m tests.codegen.test_golden`` writes them anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autoflash.codegen.render import render
from autoflash.problem import Form, Mask, Pass
from autoflash.variant import Choices, Family
from tests.factories import make_variant

FOLDER = Path(__file__).parent / "golden"
PLAIN = make_variant().structure
GOLDEN: dict[str, tuple[Form, Family, Choices]] = {
    "forward_full_tma": (Form(op=Pass.FORWARD, mask=Mask.FULL), Family.TRITON, PLAIN.replace(loads="tma")),
    "forward_causal_pointer": (
        Form(op=Pass.FORWARD, mask=Mask.CAUSAL),
        Family.TRITON,
        PLAIN.replace(pv_order="under_next_softmax", row_sum="per_thread", tile_order="heads_first"),
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_rendered_text_is_the_reviewed_one(name: str) -> None:
    assert render(*GOLDEN[name]).text == (FOLDER / f"{name}.py").read_text(encoding="utf-8")


if __name__ == "__main__":
    for golden, case in GOLDEN.items():
        (FOLDER / f"{golden}.py").write_text(render(*case).text, encoding="utf-8")
