"""The registered operators, for torch.compile, torch.export, fake tensors and functorch.

Eager calls do not come here: they go straight to the prepared calls, which are the same.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autoflash import paths
from autoflash.arguments import Options, check_tensors, policy_of, wants_tf32
from autoflash.autograd import NO_FORWARD_MODE, NO_SECOND_DERIVATIVE
from autoflash.calls import Calls, Pair, Prepared, Triple
from autoflash.errors import UnsupportedError
from autoflash.extras import check_offsets
from autoflash.runtime.executable import (
    NO_EXTRAS,
    SINGLE,
    SINGLE_TERMS,
    Extras,
    TermGradients,
    unwritten_params,
)
from autoflash.runtime.layouts import strides_in_order_of
from autoflash.runtime.modifiers import has_gradients

CALLS = Calls()
"""What this process has prepared, by either route."""

_OPTIONS = (
    "float scale, str causal, bool deterministic, str vendor, bool return_lse, bool training, SymInt window_left, "
    "SymInt window_right, float softcap, float dropout_p, SymInt longest_q, SymInt longest_k, SymInt block_size, "
    "str score_mod, str mask_mod"
)
_INPUTS = "Tensor query, Tensor key, Tensor value"
_EXTRAS = ", ".join([*(f"Tensor? {name}" for name in SINGLE), "Tensor[] params"])
_WANTED = "bool sinks_gradient, bool bias_gradient, bool alibi_gradient, bool[] params_gradient"

# torch leaves Library untyped.
_library: Any = torch.library.Library("autoflash", "DEF")  # type: ignore[no-untyped-call]
# How many extras there are, of how many one may ask for gradients, and where two of the options stand.
_COUNT, _TERMS, _RETURN_LSE, _TRAINING = len(Extras._fields), len(TermGradients._fields), 4, 5
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(f"attention_forward({_INPUTS}, {_EXTRAS}, {_OPTIONS}) -> (Tensor, Tensor)", tags=_TAGS)
_library.define(
    f"attention_backward(Tensor dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, "
    f"{_EXTRAS}, {_WANTED}, {_OPTIONS}) -> ({', '.join(['Tensor'] * (3 + len(SINGLE_TERMS)))}, Tensor[])",
    tags=_TAGS,
)


def call_key(query: Tensor, key: Tensor, value: Tensor, *options: object) -> tuple[object, ...]:
    """Everything about eager tensors that a prepared call depends on, with the options beside it."""
    addresses = (query.data_ptr(), key.data_ptr(), value.data_ptr())
    return (
        query.shape,
        query.stride(),
        key.shape,
        key.stride(),
        value.shape,
        value.stride(),
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.device,
        value.device,
        0 if not (addresses[0] | addresses[1] | addresses[2]) & 15 else tuple(a & 15 for a in addresses),
        *options,
    )


def allocate(like: Tensor, heads: int, length: int, width: int) -> Tensor:
    """An uninitialised [B, H, S, D] in the memory order of a tensor, as kernels allocate it."""
    shape = (like.shape[0], heads, length, width)
    return like.new_empty_strided(shape, strides_in_order_of(shape, like))


def _outputs(query: Tensor, value: Tensor) -> Pair:
    batch, heads, length = query.shape[:3]
    lse = query.new_empty((batch, heads, length), dtype=torch.float32)
    return allocate(query, heads, length, value.shape[3]), lse


def _gradients(query: Tensor, key: Tensor, value: Tensor) -> Triple:
    dq, dk, dv = (allocate(x, x.shape[1], x.shape[2], x.shape[3]) for x in (query, key, value))
    return dq, dk, dv


def layouts_of(extras: Extras) -> tuple[object, ...]:
    """What a prepared call depends on of its extras, but for the sequences."""
    slopes = extras.alibi_slopes
    each = None if slopes is None else slopes.shape[0]
    params = tuple((param.dtype, param.shape, param.stride()) for param in extras.params)
    lists = None if extras.query_blocks is None else extras.query_blocks.shape
    return _layout_of(extras.mask), _layout_of(extras.bias), extras.sinks is None, each, lists, params


def call_key_of(q: Tensor, k: Tensor, v: Tensor, options: Options, extras: Extras) -> tuple[object, ...]:
    """What the prepared call of a featured problem is kept under, for tensors of layout [B, H, S, D]."""
    return call_key(q, k, v, options, *layouts_of(extras), wants_tf32(q))


def _layout_of(mask: Tensor | None) -> tuple[object, ...] | None:
    """What a prepared call depends on of a mask or a bias."""
    return None if mask is None else (mask.dtype, mask.shape, mask.stride(), mask.data_ptr() % 16)


def _prepared(
    query: Tensor, key: Tensor, value: Tensor, extras: Extras, *options: Any, **gradients: bool
) -> tuple[Prepared, Pair | None]:
    """The prepared call, and its results where it had to be made to find it."""
    scale, causal, deterministic, vendor, return_lse, training, left, right, softcap, dropout_p, *rest = options
    *longest, block_size, score_mod, mask_mod = rest
    wanted = tuple(gradients.values())
    call = call_key(query, key, value, "op", *options, extras.sequences, *layouts_of(extras), *wanted)
    known = CALLS.prepared.get(call)
    if known is not None:
        return known, None
    check_tensors(query, key, value)
    chosen = Options(
        mask=causal,
        scale=scale,
        deterministic=deterministic,
        vendor=policy_of(vendor or paths.vendor_policy()),
        return_lse=return_lse,
        training=training,
        window_left=left,
        window_right=right,
        softcap=softcap,
        **gradients,
        dropout_p=dropout_p,
        sequences=extras.sequences,
        longest_q=longest[0],
        longest_k=longest[1],
        block_size=block_size,
        score_mod=score_mod,
        mask_mod=mask_mod,
    )
    return CALLS.first(call, query, key, value, chosen, extras, differentiable=False)


def _extras(*given: Any) -> Extras:
    *single, params = given
    if not params and all(extra is None for extra in single):
        return NO_EXTRAS
    return Extras(**dict(zip(SINGLE, single, strict=True)), params=tuple(params))


@contextlib.contextmanager
def _eager(device: str) -> Iterator[None]:
    """Without gradients or casts, but where torch.enable_grad() works again: verifying uses torch's own autograd.

    The dispatcher calls an operator below autograd, in a state that only private functions leave.
    """
    keys = torch._C.DispatchKey
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(keys.AutogradCPU).remove(keys.ADInplaceOrView)
    guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)
    with guard, torch.no_grad(), torch.autocast(device, enabled=False):
        yield


def _forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Pair:
    with _eager(query.device.type):
        extras, options = _extras(*rest[:_COUNT]), rest[_COUNT:]
        if extras.cu_seqlens_q is not None and extras.cu_seqlens_k is not None and query.device.type == "cpu":
            # While a program is traced, there are no values to check.
            check_offsets("cu_seqlens_q", extras.cu_seqlens_q, query.shape[2])
            check_offsets("cu_seqlens_k", extras.cu_seqlens_k, key.shape[2])
        prepared, results = _prepared(query, key, value, extras, *options)
        out, lse = prepared.forward(query, key, value, None, None, extras) if results is None else results
        if out.stride() != strides_in_order_of(out.shape, query):
            out = allocate(query, *out.shape[1:]).copy_(out)
        # A vendor's kernel gives no LSE; nobody reads it then.
        return out, lse if lse.numel() else query.new_empty(query.shape[:3], dtype=torch.float32)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    with _eager(query.device.type):
        extras, options = _extras(*rest[:_COUNT]), list(rest[_COUNT + _TERMS :])
        terms = _wanted_terms(extras, rest)
        # Whatever the forward was told: a gradient is wanted now.
        options[_TRAINING] = True
        wanted = rest[_COUNT + _TERMS - 1]
        gradients = {
            "alibi_gradient": terms.alibi_slopes is not None,
            "bias_gradient": terms.bias is not None,
            "params_gradient": bool(wanted) and has_gradients(options[-2], options[-1], wanted),
        }
        prepared, _ = _prepared(query, key, value, extras, *options, **gradients)
        into = _gradients(query, key, value)
        made = prepared.backward(query, key, value, out, lse, dout, dlse, into, extras, terms)
        return (*made, *_all(terms, extras, query))


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Pair:
    return _outputs(query, value)


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    extras = _extras(*rest[:_COUNT])
    return (*_gradients(query, key, value), *_all(_wanted_terms(extras, rest), extras, query))


def _wanted_terms(extras: Extras, rest: Sequence[Any]) -> TermGradients:
    """Gradients to be written of the terms that are wanted, as the arguments behind the extras say."""
    *wanted, of_params = rest[_COUNT : _COUNT + _TERMS]
    made = TermGradients.unwritten(extras, list(itertools.compress(SINGLE_TERMS, wanted)))
    return made._replace(params=unwritten_params(extras, of_params))


def _all(terms: TermGradients, extras: Extras, query: Tensor) -> list[Any]:
    """A tensor for each: one without elements for those that nobody asked for, since operators return no None."""
    single, params = (getattr(terms, name) for name in SINGLE_TERMS), terms.params or (None,) * len(extras.params)
    made, of_params = ([query.new_empty(0) if term is None else term for term in each] for each in (single, params))
    return [*made, of_params]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    *single, params = inputs[: 3 + _COUNT]
    ctx.save_for_backward(*single, *output, *params)
    ctx.options = inputs[3 + _COUNT :]
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any,
    dout: Tensor | None,
    dlse: Tensor | None,
    *,
    operator: Callable[..., tuple[Tensor, ...]] = torch.ops.autoflash.attention_backward,
) -> tuple[Any, ...]:
    query, key, value, *rest = ctx.saved_tensors
    count = len(SINGLE)
    extras, (out, lse), params = rest[:count], rest[count : count + 2], rest[count + 2 :]
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = dlse if ctx.options[_RETURN_LSE] else None
    *flags, of_params = ctx.needs_input_grad[3 : 3 + _COUNT]
    needed = dict(zip(SINGLE, flags, strict=True))
    # A function of functorch's has none where torch.library has a list.
    is_listed = not isinstance(of_params, bool)
    of_params = [bool(flag) for flag in of_params] if params else []
    wanted = [needed[name] for name in SINGLE_TERMS]
    made = operator(dout, dlse, query, key, value, out, lse, *extras, params, *wanted, of_params, *ctx.options)
    terms = dict(zip(SINGLE_TERMS, made[3:], strict=False))
    of_extras = (terms[name] if needed[name] else None for name in SINGLE)
    gradients = [term if flag else None for term, flag in zip(made[-1], of_params, strict=True)]
    return (*made[:3], *of_extras, gradients if is_listed else None, *(None for _ in ctx.options))


class Transformable(torch.autograd.Function):
    """The operator as functorch's grad and vmap take it; ``torch.library`` makes one that they do not."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Pair:
        """Out and LSE."""
        pair: Pair = torch.ops.autoflash.attention_forward(query, key, value, *rest)
        return pair

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
        """Keep what the backward recomputes from."""
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors; the options have none."""
        return _differentiate(ctx, *gradients, operator=_TransformableBackward.apply)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        """Refuse, in plain words."""
        raise UnsupportedError(NO_FORWARD_MODE)


class _TransformableBackward(torch.autograd.Function):
    """The backward operator likewise."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = torch.ops.autoflash.attention_backward(*arguments)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        _refuse_second(ctx, *gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise UnsupportedError(NO_FORWARD_MODE)


def _fold(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """A mapped dimension into the batch: attention knows nothing of either."""
    if tensor is None:
        return None
    mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return mapped.flatten(0, 1)


def _map(operator: Any, tensors: int) -> Any:
    """The rule of an operator whose first tensors, and the mask behind them, have a batch dimension."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        size = info.batch_size
        extras = _extras(*arguments[tensors : tensors + _COUNT])
        if arguments[-1] or arguments[-2]:
            raise UnsupportedError(
                "vmap with an expression is not built: give the mapped dimension to the batch instead"
            )
        if extras.query_blocks is not None:
            raise UnsupportedError(
                "vmap with a block mask is not built: give the mapped dimension to the batch instead"
            )
        cu_seqlens_q, rng = extras.cu_seqlens_q, extras.rng
        terms = [name for name in SINGLE_TERMS if getattr(extras, name) is not None]
        if terms:
            raise UnsupportedError(f"vmap with {terms[0]} is not built: give the mapped dimension to the batch instead")
        if cu_seqlens_q is not None:
            raise UnsupportedError("vmap of packed sequences is not built: pack more sequences instead")
        if rng is not None:
            raise UnsupportedError("vmap with dropout is not built: give the mapped dimension to the batch instead")
        folded = [_fold(x, dim, size) for x, dim in zip(arguments[: tensors + 1], in_dims[: tensors + 1], strict=True)]
        results = operator(*folded, *arguments[tensors + 1 :])
        lists = [result for result in results if not isinstance(result, Tensor)]
        results = [result for result in results if isinstance(result, Tensor)]
        mapped = tuple(result.unflatten(0, (size, -1)) for result in results if result.ndim > 1)
        # Those that nobody asked for.
        rest = results[len(mapped) :]
        return (*mapped, *rest, *lists), (*(0 for _ in mapped), *(None for _ in rest), *([] for _ in lists))

    return rule


def _refuse_second(ctx: Any, *gradients: Tensor) -> None:
    raise UnsupportedError(NO_SECOND_DERIVATIVE)


for _key in ("CPU", "CUDA"):
    _library.impl("attention_forward", _forward, _key)
    _library.impl("attention_backward", _backward, _key)
torch.library.register_fake("autoflash::attention_forward", _fake_forward, lib=_library)
torch.library.register_fake("autoflash::attention_backward", _fake_backward, lib=_library)
torch.library.register_autograd("autoflash::attention_forward", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("autoflash::attention_backward", _refuse_second, lib=_library)
torch.library.register_vmap(
    "autoflash::attention_forward", _map(torch.ops.autoflash.attention_forward, 3), lib=_library
)
torch.library.register_vmap(
    "autoflash::attention_backward", _map(torch.ops.autoflash.attention_backward, 7), lib=_library
)
