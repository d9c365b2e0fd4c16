"""From a variant to the executable that runs it on a device: the table of families."""

from __future__ import annotations

import threading

from autoflash.device import Device
from autoflash.problem import Form, Pass, Problem
from autoflash.runtime.executable import Executable
from autoflash.runtime.workspace import Workspace
from autoflash.variant import Family, Variant

_Key = tuple[Form, Variant, Device]

_bound: dict[_Key, Executable] = {}
_lock = threading.RLock()


def bind(form: Form, variant: Variant, device: Device) -> Executable:
    """The executable of a variant on a device: one for each process, however many threads ask.

    Raises:
        RenderError: if the family has no template for this form or structure.
        ImportError: if the family's compiler is not installed.
    """
    key = (form, variant, device)
    with _lock:
        executable = _bound.get(key)
        if executable is None:
            executable = _bound[key] = _make(form, variant, device)
    return executable


def workspace(problem: Problem, variant: Variant) -> Workspace | None:
    """What a call of a variant allocates beside its outputs; None for a vendor's kernel, which does not say.

    Nothing is rendered, compiled or run.

    Args:
        problem: Of the variant's pass.
        variant: Of any family.
    """
    # As above: imported for the family that is asked for alone.
    is_forward = problem.op is Pass.FORWARD
    if variant.family is Family.VENDOR:
        return None
    if variant.family is Family.TORCH_TILED:
        from autoflash.runtime import torch_workspace

        return torch_workspace.workspace(problem, variant)
    if variant.family is Family.GLUON_SM90:
        from autoflash.runtime import gluon_backward, gluon_forward

        return gluon_forward.workspace(problem, variant) if is_forward else gluon_backward.workspace(problem, variant)
    from autoflash.runtime import triton_backward, triton_forward

    return triton_forward.workspace(problem, variant) if is_forward else triton_backward.workspace(problem, variant)


def _make(form: Form, variant: Variant, device: Device) -> Executable:
    # Each family is imported when first bound: its compiler may be slow to import, or absent.
    if variant.family is Family.TORCH_TILED:
        from autoflash.runtime.torch_module import TorchTiled

        return TorchTiled(form, variant, device)
    if variant.family is Family.VENDOR:
        from autoflash.runtime.vendor import Vendor

        return Vendor(form, variant, device)
    if variant.family is Family.GLUON_SM90:
        from autoflash.runtime.gluon_backward import GluonBackward
        from autoflash.runtime.gluon_forward import GluonForward

        return GluonForward(form, variant, device) if form.op is Pass.FORWARD else GluonBackward(form, variant, device)
    if form.op is Pass.FORWARD:
        from autoflash.runtime.triton_forward import TritonForward

        return TritonForward(form, variant, device)
    from autoflash.runtime.triton_backward import TritonBackward

    return TritonBackward(form, variant, device)
