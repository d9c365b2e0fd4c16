"""Problems, bytes and bounds for machines."""

from __future__ import annotations

from autoflash.evaluate.analysis import Moved
from autoflash.evaluate.io_model import Stream, Traffic
from autoflash.evaluate.roofline import Roofline
from autoflash.keys import Json
from autoflash.problem import Problem


def problem_json(problem: Problem) -> dict[str, Json]:
    """Sizes of a problem for machines."""
    return {
        "pass": problem.op.value,
        "dtype": problem.dtype.value,
        "mask": problem.mask.value,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "batch": problem.batch,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "window": [problem.window_left, problem.window_right],
        "softcap": problem.softcap,
        "score_mod": problem.score_mod,
        "mask_mod": problem.mask_mod,
        "block_size": problem.block_size,
        "mask_tensor": problem.mask_tensor.value,
        "alibi": problem.alibi,
        "alibi_gradient": problem.alibi_gradient,
        "bias": problem.bias,
        "bias_gradient": problem.bias_gradient,
        "sinks": problem.sinks,
        "dropout_p": problem.dropout_p,
        "packed": problem.is_varlen,
    }


def traffic_json(traffic: Traffic) -> dict[str, Json]:
    """Bytes of one algorithm for machines."""
    return {
        "algorithm": traffic.algorithm,
        "blocks": None if traffic.blocks is None else [traffic.blocks.rows, traffic.blocks.keys],
        "read_bytes": traffic.read_bytes,
        "written_bytes": traffic.written_bytes,
        "total_bytes": traffic.total_bytes,
        "assumption": traffic.assumption,
        "streams": [_stream_json(stream) for stream in traffic.streams],
    }


def _stream_json(stream: Stream) -> dict[str, Json]:
    return {"tensor": stream.tensor, "read_bytes": stream.read_bytes, "written_bytes": stream.written_bytes}


def moved_json(moved: Moved) -> dict[str, Json]:
    """The same with the bound that follows, for machines."""
    return {**traffic_json(moved.traffic), "roofline": roofline_json(moved.roofline)}


def roofline_json(roofline: Roofline) -> dict[str, Json]:
    """Intensity and bounds for machines."""
    return {
        "intensity": roofline.intensity,
        "compute_us": roofline.compute_us,
        "memory_us": roofline.memory_us,
        "bound_us": roofline.bound_us,
        "limit": roofline.limit,
        "attainable_tflops": roofline.attainable_tflops,
    }
