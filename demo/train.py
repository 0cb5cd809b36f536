"""Train the demo model, trunk and MTP head together, on one GPU.

    python demo/train.py --tokens WORK/tokens --out WORK/run --seconds 750

The trunk is transformers' own Qwen3_5MoeTextModel; its layers run unchanged, only the router adds a balancing loss, and
convolution, delta rule and attention are given fused kernels and rows of fixed length. The MTP head is built from the
same decoder layer and is trained the way it is used: depth 1 sees the trunk's hidden state, deeper steps see the head's
own output, and their attention sees depth-1 keys for the past and the chain's own keys beyond it.

Weights are bf16 copies of fp32 masters, refreshed after every step. Once quantisation starts, the copies of all
matrices that ship as NVFP4 are the dequantised values, so gradients pass straight through to the masters. Muon updates
the matrices, Adam the rest. The schedule follows the clock, so that a run ends when it should:

    0.00 - 0.02  warm-up                      0.62 - 0.88  decay to zero, NVFP4 from 0.68
    0.02 - 0.62  stable                       0.88 - 1.00  trunk frozen, head distilled from the trunk
    0.62 - 0.80  every other step has rows of 8192 tokens
"""

import argparse
import inspect
import json
import math
import sys
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

# under PYTHONSAFEPATH, which tests/gpu/legs.py sets, a program's own folder is not there
sys.path.append(str(Path(__file__).resolve().parent))

from export import CONFIG
from nvfp4 import is_quantised, round_trip

MODEL = Path(__file__).resolve().parent / "model"
DEPTH = 3  # head steps in training
HEAD_WEIGHTS = (0.25, 0.15, 0.10)
BALANCE = 0.01  # weight of the router's balancing loss, per layer
MIX = {"python": 0.72, "docs": 0.13, "chat": 0.15}  # share of the rows
LATE_MIX = {"python": 0.68, "docs": 0.08, "chat": 0.24}
WARM, STABLE, QUANTISE, LONG, FREEZE = 0.02, 0.62, 0.68, 0.80, 0.88

SIZES = {
    **{key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type", "dtype")},
    "eos_token_id": None,
}
TINY = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 4,
    "moe_intermediate_size": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip


# --- transformers' layers over packed rows --------------------------------------------------------------------------
# Layers see one sequence (1, rows * length, H): their shapes, and so what is compiled, do not depend on the row length.


class Rows:
    """What the packed kernels need to know about the batch."""

    length = 2048  # tokens in a row
    chain: list | None = None  # keys and values of the head's earlier depths, while the head runs
    masks: ClassVar[dict] = {}


def rows_of(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, Rows.length, *x.shape[2:])


@torch.compiler.disable
def packed_conv(x, weight, bias=None, activation=None, **_):
    """Causal depthwise convolution; x is (1, channels, tokens)."""
    x = rows_of(x.transpose(1, 2))
    if x.is_cuda:
        from fla.modules.causal_conv1d import causal_conv1d

        out = causal_conv1d(x, weight, bias, activation=activation)[0]
    else:
        out = F.silu(
            F.conv1d(x.mT, weight[:, None], padding=weight.shape[-1] - 1, groups=len(weight))[..., : x.shape[1]]
        ).mT
    return out.reshape(1, -1, x.shape[-1]).transpose(1, 2)


# transformers hands the call to fla where that is installed: the plain version lies below the wrapper
torch_delta_rule = inspect.unwrap(hf.torch_chunk_gated_delta_rule)


@torch.compiler.disable
def packed_delta_rule(query, key, value, g, beta, **_):
    if query.is_cuda:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule
    else:
        rule = torch_delta_rule
    q, k, v, g, beta = (rows_of(t) for t in (query, key, value, g, beta))
    out = rule(q, k, v, g=g, beta=beta, output_final_state=False, use_qk_l2norm_in_kernel=True)[0]
    return out.reshape(1, -1, *out.shape[2:]), None


def delta_rule_gradients(q, k, v, do, h, dh, w, g, dv, scale, **_):
    """fla's chunk_bwd_dqkwg in plain torch: its Triton kernel is wrong on Hopper under Triton 3.4 to 3.7."""

    def chunks(x):
        return x.reshape(-1, 64, *x.shape[2:]).transpose(1, 2)  # (chunks, heads, 64, ..)

    size = q.shape
    h, dh = (x.reshape(-1, *x.shape[2:]).to(q.dtype) for x in (h, dh))
    q, k, v, do, dv, g = (chunks(x) for x in (q, k, v, do, dv, g.float()))
    last = g[..., -1:]
    dq = (do @ h.mT).float() * torch.exp2(g)[..., None] * scale
    dk = (v @ dh.mT).float() * torch.exp2(last - g)[..., None]
    dw = -(dv @ h.mT)
    dg_last = (h.float() * dh.float()).sum((-2, -1)) * torch.exp2(last[..., 0]) + (dk * k.float()).sum((-2, -1))
    lower = torch.ones(64, 64, dtype=torch.bool, device=q.device).tril()
    decay = torch.exp2((g[..., :, None] - g[..., None, :]).masked_fill(~lower, float("-inf")))
    ds = ((do @ v.mT).float() * decay * scale).to(q.dtype)
    dq = dq + (ds @ k).float()
    dk = dk + (ds.mT @ q).float()
    dg = (dq * q.float()).sum(-1) - (dk * k.float()).sum(-1)
    dg = dg + F.pad(dg_last[..., None], (63, 0))
    dq, dk, dw = (x.to(q.dtype).transpose(1, 2).reshape(size) for x in (dq, dk, dw))
    return dq, dk, dw, dg.transpose(1, 2).reshape(size[:3])


def chain_mask(length: int, depth: int, device):
    """Depth-1 keys are causal; of the deeper blocks each query sees its own chain's entry."""
    if (length, depth) not in Rows.masks:

        def visible(b, h, q, k):
            return ((k < length) & (k <= q)) | ((k >= length) & (k % length == q))

        make = create_block_mask if device.type == "cuda" else create_mask
        Rows.masks[length, depth] = make(visible, None, None, length, depth * length, device=device)
    return Rows.masks[length, depth]


flex = flex_attention


@torch.compiler.disable
def packed_attention(module, query, key, value, attention_mask, scaling, **_):
    q, k, v = (rows_of(t.transpose(1, 2)).transpose(1, 2) for t in (query, key, value))
    if Rows.chain is not None and hasattr(module, "is_head"):
        Rows.chain.append((k, v))
    if Rows.chain is not None and len(Rows.chain) > 1:
        k, v = (torch.cat(t, 2) for t in zip(*Rows.chain, strict=True))
        mask = chain_mask(Rows.length, len(Rows.chain), q.device)
        if q.is_cuda:
            out = flex(q, k, v, block_mask=mask, scale=scaling, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).reshape(1, -1, *out.shape[1:2], out.shape[-1]), None


class AddGradient(torch.autograd.Function):
    """Hands x through; adds a loss whose gradient joins in the backward pass."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.shape = loss.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(ctx.shape, device=grad.device)


def balanced_router(self, x):
    logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
    probs = torch.softmax(logits, -1, dtype=torch.float)
    top, index = torch.topk(probs, self.top_k, dim=-1)
    top = top / top.sum(-1, keepdim=True)
    if torch.is_grad_enabled():
        load = (index[..., None] == torch.arange(self.num_experts, device=x.device)).float().mean((0, 1))
        top = AddGradient.apply(top, BALANCE * self.num_experts * (load * probs.mean(0)).sum())
    return logits, top.to(logits.dtype), index


hf.causal_conv1d_fn = packed_conv
hf.torch_chunk_gated_delta_rule = packed_delta_rule
hf.Qwen3_5MoeTopKRouter.forward = balanced_router
ALL_ATTENTION_FUNCTIONS.register("packed", packed_attention)


class Head(nn.Module):
    """The MTP head; its state dict has the checkpoint's names below `mtp.`."""

    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = hf.Qwen3_5MoeRMSNorm(width)
        self.pre_fc_norm_hidden = hf.Qwen3_5MoeRMSNorm(width)
        self.layers = nn.ModuleList([hf.Qwen3_5MoeDecoderLayer(config, config.layer_types.index("full_attention"))])
        self.norm = hf.Qwen3_5MoeRMSNorm(width)
        self.layers[0].self_attn.is_head = True

    def enter(self, embedding, hidden):
        return self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1))

    def forward(self, embedding, hidden, rotary):
        return self.norm(self.layers[0](self.enter(embedding, hidden), position_embeddings=rotary))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        config._attn_implementation = "packed"
        config._experts_implementation = "grouped_mm"
        lm = Qwen3_5MoeForCausalLM(config)
        self.model, self.mtp = lm.model, Head(config)
        self.mtp.apply(lambda m: lm._init_weights(m))
        for module in self.modules():
            if isinstance(module, hf.Qwen3_5MoeGatedDeltaNet):
                nn.init.uniform_(module.conv1d.weight, -0.5, 0.5)
                dt = torch.exp(torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(0.1)))
                module.dt_bias.data.copy_(dt + torch.log(-torch.expm1(-dt)))

    def rotary(self, rows: int, shift: int, device):
        positions = torch.arange(Rows.length, device=device).repeat(rows)[None] + shift
        return self.model.rotary_emb(self.model.embed_tokens.weight, positions.expand(3, 1, -1))

    def trunk(self, ids):
        """ids (rows, length) to post-norm hidden states (1, tokens, H)."""
        x = self.model.embed_tokens(ids.reshape(1, -1))
        rotary = self.rotary(len(ids), 0, ids.device)
        for layer in self.model.layers:
            x = layer(x, position_embeddings=rotary)
        return self.model.norm(x)

    def drafts(self, ids, hidden, depth: int):
        """Head outputs of depth 1.., each (1, tokens, H). ids has `depth` more columns than the rows are long."""
        Rows.chain, out = [], []
        for d in range(1, depth + 1):
            embedding = self.model.embed_tokens(ids[:, d : d + Rows.length].reshape(1, -1))
            hidden = self.mtp(embedding, hidden, self.rotary(len(ids), d - 1, ids.device))
            out.append(hidden)
        Rows.chain = None
        return out


# --- loss -----------------------------------------------------------------------------------------------------------


def loss_chunk(h, w, y, keep, teacher, need_dw: bool):
    """Cross entropy of one chunk with its gradients; a teacher's target is half its distribution, half its argmax."""
    z = (h @ w.T).float()
    lse = z.logsumexp(-1, keepdim=True)
    columns = torch.arange(w.shape[0], device=h.device)
    p = torch.exp(z - lse)
    if teacher is None:
        target = (columns == y[:, None]).float()
        loss = lse[:, 0] - z.gather(1, y[:, None])[:, 0]
        right = z.argmax(-1) == y
    else:
        t = (teacher @ w.T).float()
        best = t.argmax(-1)
        target = 0.5 * torch.softmax(t, -1) + 0.5 * (columns == best[:, None]).float()
        loss = lse[:, 0] - (target * z).sum(-1)
        right = z.argmax(-1) == best
    grad = ((p - target) * keep[:, None]).to(h.dtype)
    dw = grad.T @ h if need_dw else None
    return loss * keep, right.float() * keep, grad @ w, dw


class LinearLoss(torch.autograd.Function):
    """Mean loss over the rows with keep = 1, through the vocabulary matrix, without holding all logits."""

    CHUNK = 8192
    chunk = staticmethod(loss_chunk)

    @staticmethod
    def forward(ctx, h, w, y, keep, teacher):
        need_dw = ctx.needs_input_grad[1]
        losses, rights, dh = [], [], torch.empty_like(h)
        dw = torch.zeros(w.shape, dtype=torch.float32, device=w.device) if need_dw else None
        for i in range(0, len(h), LinearLoss.CHUNK):
            part = slice(i, i + LinearLoss.CHUNK)
            soft = None if teacher is None else teacher[part]
            loss, right, dh[part], dw_part = LinearLoss.chunk(h[part], w, y[part], keep[part], soft, need_dw)
            losses.append(loss)
            rights.append(right)
            if need_dw:
                dw += dw_part
        count = keep.sum()
        ctx.save_for_backward(dh / count.to(dh.dtype), dw / count if need_dw else dw)
        loss, right = torch.cat(losses), torch.cat(rights)
        ctx.mark_non_differentiable(right)
        return loss.sum() / count, loss.detach(), right

    @staticmethod
    def backward(ctx, grad, *_):
        dh, dw = ctx.saved_tensors
        return grad.to(dh.dtype) * dh, None if dw is None else (grad * dw).to(dh.dtype), None, None, None


def linear_loss(h, w, y, keep=None, teacher=None):
    h = h.reshape(-1, h.shape[-1])
    keep = torch.ones(len(h), device=h.device) if keep is None else keep
    return LinearLoss.apply(h, w, y.reshape(-1), keep, teacher)


# --- data -----------------------------------------------------------------------------------------------------------


class Tokens:
    """Token streams on the device; documents are shuffled once, rows start anywhere. Files NAME*.u16 make a stream."""

    def __init__(self, folder: Path, device, seed=0):
        self.folder, self.device, self.loaded, self.streams = folder, device, [], {}
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.load()

    def load(self) -> None:
        """Reads what is there; called again now and then, it takes up files that have arrived since."""
        found = {name: sorted(self.folder.glob(f"{name}*.u16")) for name in MIX}
        if found == self.loaded:
            return
        self.loaded = found
        for name, paths in found.items():
            flat = np.concatenate([np.fromfile(path, dtype=np.uint16) for path in paths])
            pieces = np.split(flat, np.flatnonzero(flat == END) + 1)
            flat = np.concatenate([pieces[i] for i in self.rng.permutation(len(pieces))])
            self.streams[name] = torch.from_numpy(flat.astype(np.int32)).to(self.device)
        print({name: len(stream) for name, stream in self.streams.items()}, flush=True)

    def batch(self, tokens: int, length: int, mix: dict) -> torch.Tensor:
        rows, out = tokens // length, []
        counts = {name: round(rows * share) for name, share in mix.items()}
        counts["python"] += rows - sum(counts.values())
        for name, count in counts.items():
            stream = self.streams[name]
            span = length + DEPTH + 2
            starts = torch.randint(len(stream) - span, (count, 1), device=stream.device, generator=self.generator)
            out.append(stream[starts + torch.arange(span, device=stream.device)])
        return torch.cat(out).long()


END = 8179  # <|endoftext|>


# --- optimiser ------------------------------------------------------------------------------------------------------


def orthogonalise(x: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration of Muon over a stack of matrices."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x.bfloat16() / (x.norm(dim=(-2, -1), keepdim=True).bfloat16() + 1e-7)
    for a, b, c in ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                    (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)):  # fmt: skip
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return x.mT if tall else x


class Optimiser:
    """fp32 masters of all parameters, Muon for the matrices in stacks of equal shape, Adam for the rest."""

    def __init__(self, model: Model, decay=0.1):
        self.decay, self.step_count = decay, 0
        self.params = dict(model.named_parameters())
        self.masters = {n: p.detach().float().clone() for n, p in self.params.items()}
        self.state = {}
        stacks: dict = {}
        for name, p in self.params.items():
            if is_quantised(name) or name == "mtp.fc.weight":
                rows = p.shape[-2] // 2 if name.endswith("gate_up_proj") else p.shape[-2]
                stacks.setdefault((name.startswith("mtp."), rows, p.shape[-1]), []).append(name)
        self.stacks = list(stacks.items())
        muon = {n for _, names in self.stacks for n in names}
        self.rest = [n for n in self.params if n not in muon]

    def step(self, lr: float, head_lr: float, quantised: bool) -> None:
        self.step_count += 1
        for (head, rows, columns), names in self.stacks:
            rate = head_lr if head else lr
            if rate == 0:
                continue
            grads = torch.cat([self.params[n].grad.reshape(-1, rows, columns) for n in names]).float()
            key = f"{head}.{rows}.{columns}"
            momentum = self.state.setdefault(key, torch.zeros_like(grads))
            momentum.lerp_(grads, 0.05)
            update = orthogonalise(grads.lerp(momentum, 0.95)).float()
            at = 0
            for n in names:
                master = self.masters[n].view(-1, rows, columns)
                master.mul_(1 - rate * self.decay)
                master.add_(update[at : at + len(master)], alpha=-rate * 0.2 * math.sqrt(max(rows, columns)))
                at += len(master)
        self.adam(lr, head_lr)
        self.refresh(quantised)

    def adam(self, lr: float, head_lr: float) -> None:
        names = [n for n in self.rest if (head_lr if n.startswith("mtp.") else lr) > 0]
        grads = [self.params[n].grad.float() for n in names]
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        first = [self.state.setdefault(f"{n}.m", torch.zeros_like(self.masters[n])) for n in names]
        second = [self.state.setdefault(f"{n}.v", torch.zeros_like(self.masters[n])) for n in names]
        torch._foreach_lerp_(first, grads, 0.1)
        torch._foreach_lerp_(second, torch._foreach_mul(grads, grads), 0.05)
        scale1, scale2 = 1 - 0.9**self.step_count, 1 - 0.95**self.step_count
        divisor = torch._foreach_add(torch._foreach_sqrt(torch._foreach_div(second, scale2)), 1e-8)
        updates = torch._foreach_div(torch._foreach_div(first, scale1), divisor)
        for rate, head in ((lr, False), (head_lr, True)):
            chosen = [i for i, n in enumerate(names) if n.startswith("mtp.") == head]
            if chosen and rate > 0:
                torch._foreach_add_([self.masters[names[i]] for i in chosen], [updates[i] for i in chosen], alpha=-rate)

    def zero_grad(self) -> None:
        for p in self.params.values():
            p.grad = None

    @torch.no_grad()
    def refresh(self, quantised: bool) -> None:
        """Copies the masters to the model, matrices through NVFP4 and back if asked."""
        values = [
            round_trip(m.bfloat16().float(), n) if quantised and is_quantised(n) else m for n, m in self.masters.items()
        ]
        torch._foreach_copy_([p.data for p in self.params.values()], values)


# --- training -------------------------------------------------------------------------------------------------------


def rates(done: float, peak: float) -> tuple[float, float]:
    """Learning rates of trunk and head at this share of the run."""
    if done < WARM:
        return peak * max(done / WARM, 0.01), peak * max(done / WARM, 0.01)
    if done < STABLE:
        return peak, peak
    if done < FREEZE:
        left = (FREEZE - done) / (FREEZE - STABLE)
        return peak * left, peak * max(left, 0.4)
    return 0.0, peak * 0.4 * max((1 - done) / (1 - FREEZE), 0.01)


def losses_of(model: Model, ids: torch.Tensor, frozen: bool, stats: dict):
    w, length = model.model.embed_tokens.weight, Rows.length
    if frozen:
        with torch.no_grad():
            hidden, w = model.trunk(ids[:, :length]), w.detach()
        rows, total = ids, 0.0
    else:
        hidden = model.trunk(ids[:, :length])
        total, each, _ = linear_loss(hidden, w, ids[:, 1 : length + 1])
        if length == 2048:
            stats["loss"].append(each.view(len(ids), -1).mean(1))
        rows = ids[::2]
    states = hidden.view(len(ids), length, -1)[:: 1 if frozen else 2].reshape(1, len(rows) * length, -1)
    for d, m in enumerate(model.drafts(rows, states, DEPTH), 1):
        keep = teacher = None
        if frozen:
            teacher = states.view(len(rows), length, -1).roll(-d, 1).reshape(len(rows) * length, -1)
            keep = torch.ones(len(rows), length, device=ids.device)
            keep[:, length - d :] = 0
            keep = keep.view(-1)
        loss, _, right = linear_loss(m, w, rows[:, d + 1 : d + 1 + length], keep, teacher)
        total = total + HEAD_WEIGHTS[d - 1] * (2.0 if frozen else 1.0) * loss
        stats[f"right{d}"].append(right.mean())
    return total


def evaluate(model: Model, tokens: np.ndarray, tokens_per_byte: float, batch: int) -> dict:
    """Bits a byte, and how often the head's argmax equals the trunk's, teacher-forced, over rows of 2048 tokens."""
    Rows.length = min(2048, batch)
    span = Rows.length + DEPTH + 1
    device, w = model.model.embed_tokens.weight.device, model.model.embed_tokens.weight.detach()
    starts = range(0, len(tokens) - span, Rows.length)
    ids = torch.from_numpy(np.stack([tokens[s : s + span] for s in starts]).astype(np.int64)).to(device)
    rows, nats, agree, count = batch // Rows.length, 0.0, torch.zeros(DEPTH, device=device), 0
    for i in range(0, len(ids) - rows + 1, rows):
        part = ids[i : i + rows]
        with torch.no_grad():
            hidden = model.trunk(part[:, : Rows.length])
            nats += linear_loss(hidden, w, part[:, 1 : Rows.length + 1])[1].sum().item()
        count += rows * Rows.length
        best = torch.cat([(h @ w.T).argmax(-1) for h in hidden[0].split(8192)]).view(rows, -1)
        alive = torch.ones(rows, Rows.length - DEPTH, dtype=torch.bool, device=device)
        # gradients stay on here, only so that what training compiled is used again
        for d, m in enumerate(model.drafts(part, hidden, DEPTH), 1):
            mine = torch.cat([(h @ w.T).argmax(-1) for h in m.detach()[0].split(8192)]).view(rows, -1)
            alive &= mine[:, : Rows.length - DEPTH] == best[:, d : d + Rows.length - DEPTH]
            agree[d - 1] += alive.float().mean()
    agree = agree / (count / (rows * Rows.length))
    return {"bits_per_byte": nats / count / math.log(2) * tokens_per_byte, "nats_per_token": nats / count,
            "agreement": agree.tolist(), "length_at_k3": 1 + agree.sum().item()}  # fmt: skip


def save_weights(opt: Optimiser, out: Path) -> None:
    """The masters in bf16 (A_log and linear_attn.norm in fp32), in files under 15 MB."""
    parts, size = [{}], 0
    for name, master in opt.masters.items():
        keep = name.endswith("A_log") or name.endswith("linear_attn.norm.weight")
        tensor = (master if keep else master.bfloat16()).contiguous().cpu()
        if size + tensor.nbytes > 15_000_000:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    for i, part in enumerate(parts, 1):
        save_file(part, out / f"weights-{i}.safetensors")


def save_checkpoint(out: Path, opt: Optimiser, steps: int, elapsed: float) -> None:
    content = {"masters": opt.masters, "state": opt.state, "count": opt.step_count, "steps": steps, "elapsed": elapsed}
    torch.save(content, out / "checkpoint.tmp")
    (out / "checkpoint.tmp").replace(out / "checkpoint.pt")


def resume(out: Path, opt: Optimiser) -> tuple[int, float]:
    """Restores the optimiser; returns the steps and seconds that lie behind."""
    saved = torch.load(out / "checkpoint.pt", map_location=next(iter(opt.masters.values())).device)
    for name, tensor in saved["masters"].items():
        opt.masters[name].copy_(tensor)
    opt.state, opt.step_count = saved["state"], saved["count"]
    return saved["steps"], saved["elapsed"]


def build(tiny: bool, device: str) -> tuple[Model, Optimiser]:
    torch.manual_seed(0)
    model = Model(Qwen3_5MoeTextConfig(**(SIZES | (TINY if tiny else {})))).to(device)
    opt = Optimiser(model)
    for name, p in model.named_parameters():
        if not name.endswith(("A_log", "linear_attn.norm.weight")):
            p.data = p.data.bfloat16()
    return model, opt


def compile_parts(model: Model) -> None:
    """Compiles everything around the kernels; layers of one kind share their code."""
    global flex
    from fla.ops.gated_delta_rule import chunk as fla_rule

    torch._dynamo.config.recompile_limit = 64
    flex = torch.compile(flex_attention, dynamic=False)
    LinearLoss.chunk = staticmethod(torch.compile(loss_chunk, dynamic=False))
    fla_rule.chunk_bwd_dqkwg = torch.compile(delta_rule_gradients, dynamic=False)
    for layer in (*model.model.layers, *model.mtp.layers):
        layer.forward = torch.compile(layer.forward, dynamic=False)
    model.mtp.enter = torch.compile(model.mtp.enter, dynamic=False)


def warm_up(model: Model, opt: Optimiser, data: Tokens, batch: int) -> None:
    """Every kind of step once, so that compiling does not eat the schedule."""
    for length, frozen in ((2048, False), (8192, False), (2048, True)):
        Rows.length = min(length, batch // 8)
        losses_of(model, data.batch(batch, Rows.length, MIX), frozen, fresh()).backward()
        opt.step(0.0 if frozen else 1e-9, 1e-9, quantised=True)
    opt.zero_grad()


def fresh() -> dict:
    return {"loss": [], **{f"right{d}": [] for d in range(1, DEPTH + 1)}}


def summary(stats: dict, mix: dict) -> dict:
    """Mean loss of the Python rows, and how often each depth's argmax is right, since the last summary."""
    rows = torch.stack(stats["loss"]).mean(0) if stats["loss"] else torch.empty(0)
    python = rows[: round(len(rows) * mix["python"])].mean().item() if len(rows) else None
    right = [round(torch.stack(stats[f"right{d}"]).mean().item(), 4) for d in range(1, DEPTH + 1)]
    return {"python_loss": python, "right": right}


def train(model: Model, opt: Optimiser, data: Tokens, args, steps: int, behind: float) -> list[dict]:
    """The schedule, by the clock; returns the log."""
    stats, log, previous, tokens = fresh(), [], None, 0
    start = last_print = last_save = time.time()
    while (elapsed := behind + time.time() - start) < args.seconds:
        done = elapsed / args.seconds
        lr, head_lr = rates(done, args.peak)
        mix = LATE_MIX if done >= STABLE else MIX
        long = STABLE <= done < LONG and steps % 2
        Rows.length = min(8192 if long else 2048, args.batch // 8)
        ids = data.batch(args.batch, Rows.length, mix)
        losses_of(model, ids, done >= FREEZE, stats).backward()
        opt.step(lr, head_lr, quantised=done >= QUANTISE)
        opt.zero_grad()
        steps, tokens = steps + 1, tokens + args.batch
        if ids.is_cuda:
            # at most one step ahead of the device, or the clock would mean nothing
            if previous is not None:
                previous.synchronize()
            previous = torch.cuda.Event()
            previous.record()
        if steps % args.every == 0:
            rate = round(tokens / (time.time() - last_print))
            log.append({"step": steps, "done": round(done, 4), "tokens_per_second": rate, **summary(stats, mix)})
            print(json.dumps(log[-1]), flush=True)
            stats, last_print, tokens = fresh(), time.time(), 0
            data.load()
        if time.time() - last_save > 150:
            save_checkpoint(args.out, opt, steps, elapsed)
            last_save = time.time()
    save_checkpoint(args.out, opt, steps, elapsed)
    return log


def score(model: Model, opt: Optimiser, folder: Path, batch: int, limit: int) -> dict:
    """Held-out bits a byte and agreement of the head, with bf16 and with NVFP4 weights."""
    sizes, results = json.loads((folder / "sizes.json").read_text()), {}
    for name in ("heldout", "heldout_docs"):
        flat = np.fromfile(folder / f"{name}.u16", dtype=np.uint16)[:limit]
        for quantised in (False, True):
            opt.refresh(quantised)
            rows = min(batch, len(flat) // 4 // 2048 * 2048) or 512
            key = f"{name}_{'nvfp4' if quantised else 'bf16'}"
            results[key] = evaluate(model, flat, sizes[name]["tokens"] / sizes[name]["bytes"], rows)
            print(key, results[key], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=750, help="clock time of the whole schedule")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/checkpoint.pt")
    parser.add_argument("--batch", type=int, default=131072, help="tokens a step")
    parser.add_argument("--peak", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--every", type=int, default=100, help="steps between two lines of the log")
    parser.add_argument("--limit", type=int, default=2_000_000, help="held-out tokens that are scored")
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the script on a CPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, opt = build(args.tiny, device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    steps, behind = resume(args.out, opt) if args.resume else (0, 0.0)
    data = Tokens(args.tokens, device, seed=steps)
    if device == "cuda":
        compile_parts(model)
    if not args.resume:
        warm_up(model, opt, data, args.batch)
    log = train(model, opt, data, args, steps, behind)
    save_weights(opt, args.out)
    results = score(model, opt, args.tokens, args.batch, args.limit)
    (args.out / "results.json").write_text(json.dumps({"results": results, "log": log}))


if __name__ == "__main__":
    main()
