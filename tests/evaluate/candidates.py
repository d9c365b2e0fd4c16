"""A kernel written as plainly as possible, right in its roundings, into which a test can put one fault."""

from __future__ import annotations

import math

import torch

from autoflash.variant import Choices, Family, Variant

TILE = 16


class Kernel:
    """Tiled attention and its backward on the CPU, with probabilities rounded to the inputs' dtype before products.

    ``fault`` names what is wrong with it; None is an honest kernel.
    """

    source_digest = "0123456789abcdef"
    variant = Variant(family=Family.TRITON, structure=Choices(), config=Choices())

    def __init__(self, fault=None, refuses=lambda problem, *tensors: None):
        self.fault = fault
        self.why_not = refuses
        self.launches = 0

    def prepare_forward(self, problem, q, k, v, scale):
        def call(q, k, v, out=None, lse=None):
            out = torch.empty_like(q[..., :1].expand(*q.shape[:3], v.shape[3])) if out is None else out
            lse = q.new_empty(q.shape[:3], dtype=torch.float32) if lse is None else lse
            self._forward(problem, q, k, v, out, lse, scale)
            return out, lse

        return call

    def prepare_backward(self, problem, q, k, v, out, dout, scale):
        def call(q, k, v, out, lse, dout, dlse=None, dq=None, dk=None, dv=None):
            given = zip((dq, dk, dv), (q, k, v), strict=True)
            grads = [torch.empty_like(like) if grad is None else grad for grad, like in given]
            self._backward(problem, q, k, v, out, lse, dout, dlse, *grads, scale)
            return tuple(grads)

        return call

    def _scores(self, problem, q, k, scale):
        """Float32 scores [B, H, M, N], -inf where hidden."""
        group = problem.group
        s = q.float() @ k.float().repeat_interleave(group, dim=1).mT * scale
        rows, keys = torch.arange(problem.seqlen_q)[:, None], torch.arange(problem.seqlen_k)[None]
        shift = {"diagonal one too far": 1, "diagonal one too near": -1}.get(self.fault, 0)
        if problem.causal:
            s = s.masked_fill(keys > rows + problem.diagonal + shift, -math.inf)
        last = problem.seqlen_k - 1
        if self.fault == "last key dropped":
            s = s.masked_fill(keys == last, -math.inf)
        if self.fault == "last key doubled":
            s = s + (keys == last) * math.log(2.0)
        if self.fault == "a tile skipped":
            s = s.masked_fill(keys // TILE == 2, -math.inf)
        if self.fault == "first key of a tile dropped":
            s = s.masked_fill(keys == 3 * TILE, -math.inf)
        if self.fault == "last key of a tile dropped":
            s = s.masked_fill(keys == 4 * TILE - 1, -math.inf)
        return s

    def _forward(self, problem, q, k, v, out, lse, scale):
        s = self._scores(problem, q, k, scale)
        values = v.float().repeat_interleave(problem.group, dim=1)
        m, total, acc = torch.full((*s.shape[:3], 1), -1e30), torch.zeros(*s.shape[:3], 1), 0.0
        for start in range(0, problem.seqlen_k, TILE):
            tile = s[..., start : start + TILE]
            new = torch.maximum(m, tile.amax(dim=-1, keepdim=True))
            p, alpha = torch.exp(tile - new), torch.exp(m - new)
            total = total * alpha + p.sum(dim=-1, keepdim=True)
            acc = acc * alpha + p.to(q.dtype).float() @ values[..., start : start + TILE, :]
            m = new
        result = acc / total.masked_fill(total == 0, 1.0) + torch.zeros(out.shape)
        result_lse = (m + total.log()).squeeze(-1)
        if self.fault == "lse a little too large":
            result_lse += 0.005
        if self.fault == "lse in base 2":
            result_lse /= math.log(2.0)
        if self.fault == "lse finite in blind rows":
            result_lse = result_lse.clamp(min=-1e4)
        if self.fault == "average in blind rows":
            result = torch.where(total == 0, values.mean(dim=2, keepdim=True), result)
        if self.fault == "output a little too large":
            result *= 1.01
        self._write("out", out, result)
        self._write("lse", lse, result_lse)
        self._damage(q, out)

    def _backward(self, problem, q, k, v, out, lse, dout, dlse, dq, dk, dv, scale):
        s = self._scores(problem, q, k, scale)
        keys, values = (tensor.float().repeat_interleave(problem.group, dim=1) for tensor in (k, v))
        p = torch.exp(s - lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1))
        delta = (dout.float() * out.float()).sum(dim=-1)
        if dlse is not None and self.fault != "dlse ignored":
            delta = delta - dlse
        if self.fault == "delta left out":
            delta = torch.zeros_like(delta)
        ds = p * (dout.float() @ values.mT - delta.unsqueeze(-1))
        p, ds = p.to(q.dtype).float(), ds.to(q.dtype).float()
        by_head = {"dk": ds.mT @ q.float() * scale, "dv": p.mT @ dout.float()}
        grouped = {name: grad.unflatten(1, (problem.kv_heads, -1)) for name, grad in by_head.items()}
        one = slice(0, 1) if self.fault == "one head of each group only" else slice(None)
        grads = {"dq": ds @ keys * scale} | {name: grad[:, :, one].sum(dim=2) for name, grad in grouped.items()}
        self.launches += 1
        if self.fault == "not deterministic" and self.launches % 4 == 0:
            grads["dq"] = torch.nextafter(grads["dq"].to(q.dtype), torch.ones((), dtype=q.dtype))
        for (name, grad), target in zip(grads.items(), (dq, dk, dv), strict=True):
            self._write(name, target, grad * 1.01 if self.fault == f"{name} a little too large" else grad)
        self._damage(q, dq)

    def _write(self, name, target, result):
        if self.fault == f"last row of {name} not written":
            target, result = target[:, :, :-1], result[:, :, :-1]
        if self.fault == f"last block of {name} wrong" and target.shape[2] > TILE:
            result[:, :, -TILE:] = result[:, :, -TILE - 1 : -TILE]
        target.copy_(result)

    def _damage(self, q, output):
        if self.fault == "an input changed":
            q[..., -1:, -1] += 1.0
        if self.fault == "written before the output":
            output.as_strided((1,), (1,), output.storage_offset() - 1).fill_(0.0)
        if self.fault == "NaN written behind the output":
            end = sum((size - 1) * stride for size, stride in zip(output.shape, output.stride(), strict=True))
            output.as_strided((1,), (1,), output.storage_offset() + end + 1).fill_(math.nan)


class Fails(Kernel):
    """Raises when launched."""

    def _forward(self, *arguments):
        raise RuntimeError("an illegal memory access was encountered")
