"""A kernel written as plainly as possible, right in its roundings, into which a test can put one fault."""

from __future__ import annotations

import math

import torch

from autoflash.evaluate.philox import dropout_keep
from autoflash.problem import Alignment
from autoflash.runtime.executable import NO_EXTRAS, NO_TERMS
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

    def prepare_forward(self, problem, q, k, v, scale, extras=NO_EXTRAS):
        def call(q, k, v, out=None, lse=None, extras=NO_EXTRAS):
            out = torch.empty_like(q[..., :1].expand(*q.shape[:3], v.shape[3])) if out is None else out
            lse = q.new_empty(q.shape[:3], dtype=torch.float32) if lse is None else lse
            self._clear(problem, {"out": (out, 0.0), "lse": (lse, -math.inf)})
            for one, b, rows, keys in self._sequences(problem, extras):
                parts = [q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows]]
                self._forward(one, *parts, scale, extras, b)
            self._damage(q, out, extras)
            return out, lse

        return call

    def prepare_backward(self, problem, q, k, v, out, dout, scale, extras=NO_EXTRAS):
        def call(q, k, v, out, lse, dout, dlse=None, dq=None, dk=None, dv=None, extras=NO_EXTRAS, terms=NO_TERMS):
            given = zip((dq, dk, dv), (q, k, v), strict=True)
            dq, dk, dv = (torch.empty_like(like) if grad is None else grad for grad, like in given)
            self._clear(problem, {"dq": (dq, 0.0), "dk": (dk, 0.0), "dv": (dv, 0.0)})
            for term in terms.present.values():
                term.zero_()
            for one, b, rows, keys in self._sequences(problem, extras):
                parts = [tensor[:, :, rows] for tensor in (q, out, lse, dout)]
                parts += [None if dlse is None else dlse[:, :, rows]]
                grads = [dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]]
                self._backward(one, k[:, :, keys], v[:, :, keys], *parts, *grads, scale, extras, b, terms)
            self._finish_terms(terms)
            self._damage(q, dq, extras)
            return dq, dk, dv

        return call

    def _clear(self, problem, outputs):
        """What belongs to no sequence."""
        if problem.is_varlen:
            for name, (tensor, value) in outputs.items():
                if self.fault != f"{name} of rows of no sequence not written":
                    tensor.fill_(value)

    def _sequences(self, problem, extras):
        """Each sequence: the problem that it is, its number, and where its queries and keys lie."""
        if not problem.is_varlen:
            yield problem, 0, slice(None), slice(None)
            return
        starts_q, starts_k = extras.cu_seqlens_q.tolist(), extras.cu_seqlens_k.tolist()
        for b in range(len(starts_q) - 1):
            start, end = starts_k[b : b + 2]
            if self.fault == "sequence ends one key too late":
                end = min(end + 1, starts_k[-1])
            if self.fault == "sequence ends one key too early":
                end = max(end - 1, start)
            if self.fault == "sequence begins one key too early":
                start = max(start - 1, 0)
            first, last = starts_q[b : b + 2]
            if self.fault == "last query of a sequence is of the next":
                first, last = max(first - 1, 0), last - 1 if b < len(starts_q) - 2 else last
            one = problem.replace(
                packed_q=None, packed_k=None, batch=1, seqlen_q=max(last - first, 0), seqlen_k=end - start
            )
            if self.fault == "diagonal of the longest sequence":
                one = one.replace(alignment=Alignment.BOTTOM_RIGHT)
                self._diagonal = problem.seqlen_k - problem.seqlen_q
            yield one, b, slice(first, max(last, first)), slice(start, end)

    def _scores(self, problem, q, k, scale, extras, b):
        """Float32 scores [B, H, M, N], -inf where hidden, and the slope of the softcap."""
        group, fault = problem.group, self.fault
        s = q.float() @ k.float().repeat_interleave(group, dim=1).mT * scale
        mask = self._mask(extras)
        slope = torch.ones_like(s)
        if mask is not None and mask.dtype is not torch.bool and fault == "float mask before the softcap":
            s = s + mask.float()
        if problem.softcap and fault != "softcap ignored":
            capped = torch.tanh(s / problem.softcap)
            s, slope = problem.softcap * capped, 1.0 - capped * capped
        if extras.alibi_slopes is not None and fault != "slopes ignored":
            s = s - self._slopes(extras, b) * self._distance(problem, s)
        bias = self._bias(extras, s.shape)
        if bias is not None:
            s = s + bias
        if mask is not None and fault != "float mask before the softcap":
            s = s.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else s + mask.float()
        rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        diagonal = problem.diagonal if fault != "diagonal of the longest sequence" else self._diagonal
        diagonal += {"diagonal one too far": 1, "diagonal one too near": -1}.get(fault, 0)
        if problem.causal:
            s = s.masked_fill(keys > rows + diagonal, -math.inf)
        left, right = problem.window_left, problem.window_right
        if left is not None and fault != "window ignored":
            left += {"window one too far to the left": 1, "window one too near to the left": -1}.get(fault, 0)
            s = s.masked_fill(keys < rows + diagonal - left, -math.inf)
        if right is not None and fault != "window ignored":
            right += {"window one too far to the right": 1, "window one too near to the right": -1}.get(fault, 0)
            s = s.masked_fill(keys > rows + diagonal + right, -math.inf)
        last = k.shape[2] - 1
        if fault == "last key dropped":
            s = s.masked_fill(keys == last, -math.inf)
        if fault == "last key doubled":
            s = s + (keys == last) * math.log(2.0)
        if fault == "a tile skipped":
            s = s.masked_fill(keys // TILE == 2, -math.inf)
        if fault == "first key of a tile dropped":
            s = s.masked_fill(keys == 3 * TILE, -math.inf)
        if fault == "last key of a tile dropped":
            s = s.masked_fill(keys == 4 * TILE - 1, -math.inf)
        return s, slope

    def _slopes(self, extras, b):
        """[B or 1, H, 1, 1]; of packed sequences, those of one."""
        slopes, fault = extras.alibi_slopes, self.fault
        if extras.cu_seqlens_q is not None and len(slopes) > 1:
            slopes = slopes[b : b + 1]
        if fault == "slopes of the first batch entry":
            slopes = slopes[:1]
        if fault == "slopes of the next head":
            slopes = slopes.roll(1, dims=1)
        return slopes[:, :, None, None] * (-1.0 if fault == "slopes with the other sign" else 1.0)

    def _distance(self, problem, s):
        """[M, N]."""
        rows, keys = torch.arange(s.shape[2])[:, None], torch.arange(s.shape[3])[None]
        diagonal = self._diagonal if self.fault == "diagonal of the longest sequence" else problem.diagonal
        distance = rows + diagonal + (self.fault == "distance from one query on") - keys
        return distance if self.fault == "distance without its absolute value" else distance.abs()

    def _bias(self, extras, shape):
        """Float32, as it is added to scores [B, H, M, N]."""
        fault = self.fault
        if extras.bias is None or fault == "bias ignored":
            return None
        bias = extras.bias.float().expand(shape)
        if fault == "bias of the first head":
            return bias[:, :1]
        if fault == "bias of the first batch entry":
            return bias[:1]
        if fault == "bias transposed" and shape[2] == shape[3]:
            return bias.mT
        if fault == "bias one key to the right":
            return bias.roll(1, dims=-1)
        return bias.roll(1, dims=-2) if fault == "bias one query down" else bias

    def _mask(self, extras):
        mask, fault = extras.mask, self.fault
        if mask is None or fault == "mask ignored":
            return None
        if fault == "mask inverted":
            return ~mask
        if fault == "mask of the first head":
            return mask[:, :1]
        if fault == "mask of the first batch entry":
            return mask[:1]
        if fault == "mask one key to the right":
            return mask.roll(1, dims=-1)
        return mask

    def _kept(self, problem, q, k, extras, b, is_backward):
        """Factor of each probability [B, H, M, N]."""
        if not problem.dropout_p or self.fault == "dropout ignored":
            return 1.0
        seed, offset = extras.rng.tolist()
        if is_backward and self.fault == "another dropout in the backward":
            offset += 1
        if self.fault == "upper half of the seed ignored":
            seed &= 0xFFFFFFFF
        first = 0 if self.fault == "dropout of the first sequence" else b
        heads = 1 if self.fault == "dropout of the first head" else q.shape[1]
        keep = dropout_keep(
            (seed, offset),
            problem.dropout_p,
            q.shape[0],
            heads,
            slice(0, q.shape[2]),
            k.shape[2],
            "cpu",
            first_batch=first,
        )
        share = problem.dropout_p if self.fault == "dropout scaled by p" else 1.0 - problem.dropout_p
        return keep.float() if self.fault == "dropout not scaled" else keep.float() / share

    def _forward(self, problem, q, k, v, out, lse, scale, extras, b):
        s, _ = self._scores(problem, q, k, scale, extras, b)
        values = v.float().repeat_interleave(problem.group, dim=1)
        kept = torch.as_tensor(self._kept(problem, q, k, extras, b, False)).expand_as(s)
        m, total, acc = torch.full((*s.shape[:3], 1), -1e30), torch.zeros(*s.shape[:3], 1), 0.0
        sinks = self._sinks(extras)
        if sinks is not None:
            m, total = torch.maximum(m, sinks), total + (sinks > -math.inf)
        if self.fault == "maximum begins at 0":
            m = torch.zeros_like(m)
        for start in range(0, k.shape[2], TILE):
            tile = s[..., start : start + TILE]
            new = torch.maximum(m, tile.amax(dim=-1, keepdim=True))
            p, alpha = torch.exp(tile - new), torch.exp(m - new)
            dropped = p * kept[..., start : start + TILE]
            total = total * alpha + (dropped if self.fault == "dropout in the normaliser" else p).sum(
                dim=-1, keepdim=True
            )
            acc = acc * alpha + dropped.to(q.dtype).float() @ values[..., start : start + TILE, :]
            m = new
        result = acc / total.masked_fill(total == 0, 1.0) + torch.zeros(out.shape)
        result_lse = (m + total.log()).squeeze(-1)
        if self.fault == "sink left out of the lse":
            result_lse = torch.logsumexp(s, dim=-1)
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

    def _sinks(self, extras):
        """[H, 1, 1]."""
        if extras.sinks is None or self.fault == "sink ignored":
            return None
        sinks = extras.sinks[:, None, None]
        if self.fault == "sink of the next head":
            return sinks.roll(1, dims=0)
        return sinks * math.log(2.0) if self.fault == "sink in base 2" else sinks

    def _add_sinks_gradient(self, dsinks, sinks, lse, delta):
        share = torch.exp(sinks[:, None] - lse.masked_fill(lse == -math.inf, math.inf))
        dsinks -= (share * delta).sum(dim=(0, 2))

    def _finish_terms(self, terms):
        for name, term in terms._asdict().items():
            if term is not None and self.fault == f"d{name} a little too large":
                term *= 1.01
            if term is not None and self.fault == f"last element of d{name} not written":
                term.view(-1)[-1:] = math.nan
            if term is not None and self.fault in (f"d{name} of the next head", f"d{name} of the next key"):
                term.copy_(term.roll(1, dims=-1))

    def _backward(self, problem, k, v, q, out, lse, dout, dlse, dq, dk, dv, scale, extras, b, terms):
        s, slope = self._scores(problem, q, k, scale, extras, b)
        keys, values = (tensor.float().repeat_interleave(problem.group, dim=1) for tensor in (k, v))
        p = torch.exp(s - lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1))
        kept = self._kept(problem, q, k, extras, b, True)
        delta = (dout.float() * out.float()).sum(dim=-1)
        if dlse is not None and self.fault != "dlse ignored":
            delta = delta - dlse
        if self.fault == "delta left out":
            delta = torch.zeros_like(delta)
        if terms.sinks is not None:
            self._add_sinks_gradient(terms.sinks, extras.sinks, lse, delta)
        ds = p * (dout.float() @ values.mT * kept - delta.unsqueeze(-1))
        if terms.alibi_slopes is not None:
            parts = -(ds * self._distance(problem, s)).sum(dim=(2, 3))
            total = terms.alibi_slopes
            if extras.cu_seqlens_q is not None and len(total) > 1:
                total = total[b : b + 1]
            if self.fault == "dalibi_slopes of the first batch entry alone":
                parts = parts[:1]
            total += parts if len(total) == len(parts) else parts.sum(dim=0, keepdim=True)
        if terms.bias is not None:
            one = ds[:1] if self.fault == "dbias of the first batch entry alone" else ds
            shared = [dim for dim in range(4) if terms.bias.shape[dim] == 1]
            terms.bias.add_(one.sum(dim=shared, keepdim=True) if shared else one)
        if self.fault != "softcap without its derivative":
            ds = ds * slope
        p, ds = (p * (1.0 if self.fault == "dv without dropout" else kept)).to(q.dtype).float(), ds.to(q.dtype).float()
        by_head = {"dk": ds.mT @ q.float() * scale, "dv": p.mT @ dout.float()}
        grouped = {name: grad.unflatten(1, (problem.kv_heads, -1)) for name, grad in by_head.items()}
        one = slice(0, 1) if self.fault == "one head of each group only" else slice(None)
        grads = {"dq": ds @ keys * scale} | {name: grad[:, :, one].sum(dim=2) for name, grad in grouped.items()}
        self.launches += 1
        if self.fault == "not deterministic" and self.launches % 4 == 0:
            grads["dq"] = torch.nextafter(grads["dq"].to(q.dtype), torch.ones((), dtype=q.dtype))
        for (name, grad), target in zip(grads.items(), (dq, dk, dv), strict=True):
            self._write(name, target, grad * 1.01 if self.fault == f"{name} a little too large" else grad)

    def _write(self, name, target, result):
        if self.fault == f"last row of {name} not written":
            target, result = target[:, :, :-1], result[:, :, :-1]
        if self.fault == f"last block of {name} wrong" and target.shape[2] > TILE:
            result[:, :, -TILE:] = result[:, :, -TILE - 1 : -TILE]
        target.copy_(result)

    def _damage(self, q, output, extras):
        if self.fault == "an input changed":
            q[..., -1:, -1] += 1.0
        if self.fault == "a mask changed":
            extras.mask[..., -1:, -1:] = True
        if self.fault == "the offset of the dropout advanced":
            extras.rng[1] += 1
        if self.fault == "the beginnings of sequences changed":
            extras.cu_seqlens_k[-1] += 1
        if self.fault == "written before the output":
            output.as_strided((1,), (1,), output.storage_offset() - 1).fill_(0.0)
        if self.fault == "NaN written behind the output":
            end = sum((size - 1) * stride for size, stride in zip(output.shape, output.stride(), strict=True))
            output.as_strided((1,), (1,), output.storage_offset() + end + 1).fill_(math.nan)


class Fails(Kernel):
    """Raises when launched."""

    def _forward(self, *arguments):
        raise RuntimeError("an illegal memory access was encountered")
