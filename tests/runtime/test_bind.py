from __future__ import annotations

import threading

import pytest

from autoflash.errors import RenderError
from autoflash.problem import Form, Mask, Pass
from autoflash.runtime.bind import bind
from autoflash.runtime.torch_module import TorchTiled
from autoflash.runtime.vendor import Vendor
from autoflash.variant import Family
from tests.factories import make_device, make_variant


@pytest.mark.parametrize("op", Pass)
@pytest.mark.parametrize(("family", "kind"), [(Family.TORCH_TILED, TorchTiled), (Family.VENDOR, Vendor)])
def test_each_family_has_its_executable(op, family, kind):
    variant = make_variant(family=family, op=op)

    executable = bind(Form(op=op, mask=Mask.FULL), variant, make_device("cpu"))

    assert isinstance(executable, kind)
    assert executable.variant == variant
    assert executable.device == make_device("cpu")


@pytest.mark.parametrize(
    ("op", "module", "name"),
    [(Pass.FORWARD, "triton_forward", "TritonForward"), (Pass.BACKWARD, "triton_backward", "TritonBackward")],
)
def test_the_passes_of_triton_have_executables_of_their_own(op, module, name):
    executable = bind(Form(op=op, mask=Mask.CAUSAL), make_variant(family=Family.TRITON, op=op), make_device())

    assert type(executable).__name__ == name
    assert type(executable).__module__ == f"autoflash.runtime.{module}"


def test_a_variant_is_bound_once():
    variant = make_variant(family=Family.TORCH_TILED)
    first = bind(Form(op=Pass.FORWARD, mask=Mask.FULL), variant, make_device("cpu"))

    assert bind(Form(op=Pass.FORWARD, mask=Mask.FULL), variant, make_device("cpu")) is first
    assert bind(Form(op=Pass.FORWARD, mask=Mask.CAUSAL), variant, make_device("cpu")) is not first
    assert bind(Form(op=Pass.FORWARD, mask=Mask.FULL), variant, make_device("sm_80")) is not first


def test_threads_get_the_same_executable():
    variant = make_variant(family=Family.TORCH_TILED)
    bound = []

    def work():
        bound.append(bind(Form(op=Pass.FORWARD, mask=Mask.FULL), variant, make_device("sm_86")))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(bound) == 8
    assert len(set(map(id, bound))) == 1


def test_a_structure_without_a_template_is_an_error():
    variant = make_variant(family=Family.TORCH_TILED)
    broken = type(variant)(
        family=variant.family, structure=variant.structure.replace(loop_order="diagonal"), config=variant.config
    )

    with pytest.raises(RenderError):
        bind(Form(op=Pass.FORWARD, mask=Mask.FULL), broken, make_device("cpu"))
