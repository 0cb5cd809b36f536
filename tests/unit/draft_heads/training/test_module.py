"""The head that is trained against the head that is served, and its loss against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pilotfish.draft_heads.training.loss import ARGMAX_SHARE, ROWS_AT_ONCE, DraftLoss
from pilotfish.draft_heads.training.module import TrainableHead
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.model.build import with_head
from pilotfish.engine.model.window import Span, Window
from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.linear import padded_rows
from tests.support.rounds import make_engine
from tests.support.tiny_models import build_tiny

LENGTH, DEPTHS, NUM_PAGES = PAGE + 20, 4, 3
# fp32 sums in other orders, through a layer and the recursion on its output
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(scope="module", params=["hv_gt_hk", "moe"])
def heads(request, tmp_path_factory):
    """The trainable head with the checkpoint's weights, and the served model with the same."""
    checkpoint = open_checkpoint(build_tiny(tmp_path_factory.mktemp("model"), request.param))
    own = {n: w for n, w in load_weights(checkpoint, progress=False).items() if n.startswith("mtp.")}
    trainable = TrainableHead(checkpoint.config)
    trainable.load_state_dict({name.removeprefix("mtp."): weight for name, weight in own.items()})
    return trainable, with_head(make_engine(request.param, depth=0).runner.model, own, NUM_PAGES)


@pytest.fixture(scope="module")
def pairs(heads):
    generator = torch.Generator().manual_seed(0)
    config = heads[1].config
    tokens = torch.randint(0, config.vocab_size, (LENGTH + DEPTHS,), generator=generator)
    return tokens, torch.randn(LENGTH, config.hidden_size, generator=generator)


def unrolled(trainable, model, tokens, hidden):
    """[depths, T, H]"""
    embedding = model.trunk.embedding.float()
    outputs = trainable.unroll(
        hidden[None], DEPTHS, lambda depth, _: F.embedding(tokens[None, depth - 1 :][:, :LENGTH], embedding)
    )
    return torch.cat(outputs)


@torch.inference_mode()
def test_first_depth_is_the_served_heads(heads, pairs):
    trainable, model = heads
    tokens, hidden = pairs
    span = Span.build(1, 0, LENGTH, [1, 2], model.inv_freq)
    served = model.head.fill(tokens[:LENGTH], hidden, span)
    torch.testing.assert_close(unrolled(trainable, model, tokens, hidden)[0], served, **CLOSE)


@torch.inference_mode()
@pytest.mark.parametrize("start", [0, 1, PAGE - 2, PAGE, LENGTH - 1])
def test_deeper_depths_are_the_served_recursion(heads, pairs, start):
    trainable, model = heads
    tokens, hidden = pairs
    wanted = unrolled(trainable, model, tokens, hidden)[:, start]
    rows = model.head.fill(
        tokens[: start + 1], hidden[: start + 1], Span.build(1, 0, start + 1, [1, 2], model.inv_freq)
    )
    row = rows[-1:]
    for depth in range(1, DEPTHS):
        window = Window.build(1, torch.tensor([1]), [start + depth], [[1, 2]], model.inv_freq)
        padding = padded_rows(1) - 1
        token = F.pad(tokens[start + depth : start + depth + 1], (0, padding))
        row = model.head.repair(token, F.pad(row[:1], (0, 0, 0, padding)), window)
        torch.testing.assert_close(row[0], wanted[depth], **CLOSE)


def test_a_draft_sees_no_later_text(heads, pairs):
    trainable, model = heads
    tokens, hidden = pairs
    changed, later = tokens.clone(), hidden.clone()
    cut = 40
    changed[cut + DEPTHS :] = 0
    later[cut:] = 1.0
    before, after = (unrolled(trainable, model, *pair)[:, :cut] for pair in ((tokens, hidden), (changed, later)))
    # not bit for bit: which rows share an expert differs
    torch.testing.assert_close(before, after, **CLOSE)


class TestLoss:
    NUM, HIDDEN, VOCAB = ROWS_AT_ONCE + 7, 16, 50

    @pytest.fixture
    def values(self):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=generator)

        keep = torch.rand(2, self.NUM, generator=generator) < 0.7
        labels = torch.randint(0, self.VOCAB, (self.NUM,), generator=generator)
        drafts = draw(2, self.NUM, self.HIDDEN).requires_grad_()
        return drafts, keep, draw(self.NUM, self.HIDDEN), labels, draw(self.VOCAB, self.HIDDEN)

    def target(self, teacher, labels, lm_head, kind):
        if kind == "text":
            return F.one_hot(labels, self.VOCAB).float()
        p = (teacher @ lm_head.T).softmax(1)
        return (1 - ARGMAX_SHARE) * p + ARGMAX_SHARE * F.one_hot(p.argmax(1), self.VOCAB)

    @pytest.mark.parametrize("kind", ["trunk", "text"])
    def test_equals_torchs_cross_entropy_and_its_gradient(self, values, kind):
        drafts, keep, teacher, labels, lm_head = values
        target = self.target(teacher, labels, lm_head, kind)
        wanted = torch.stack([F.cross_entropy(d[k] @ lm_head.T, target[k]) for d, k in zip(drafts, keep, strict=True)])
        (wanted * torch.tensor([1.0, 0.5])).sum().backward()
        gradient, drafts.grad = drafts.grad, None
        got, hits = DraftLoss.apply(
            drafts, keep, teacher if kind == "trunk" else None, None if kind == "trunk" else labels, lm_head
        )
        (got * torch.tensor([1.0, 0.5])).sum().backward()
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(drafts.grad, gradient, rtol=1e-4, atol=1e-7)
        agree = [(d[k] @ lm_head.T).argmax(1) == target[k].argmax(1) for d, k in zip(drafts, keep, strict=True)]
        torch.testing.assert_close(hits, torch.stack([a.float().mean() for a in agree]))

    def test_of_equal_logits_the_lowest_id_is_the_first_choice(self):
        hidden, lm_head = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [2.0, 1.0], [2.0, 1.0]])
        drafts, keep = hidden.flip(0)[None].contiguous(), torch.ones(1, 2, dtype=torch.bool)
        # drafts choose ids 0 and 1; so do teachers, in the other order
        _, other = DraftLoss.apply(drafts, keep, hidden, None, lm_head)
        _, same = DraftLoss.apply(hidden[None].contiguous(), keep, hidden, None, lm_head)
        _, label = DraftLoss.apply(drafts, keep, None, torch.tensor([0, 2]), lm_head)
        assert other.tolist() == [0.0] and same.tolist() == [1.0] and label.tolist() == [0.5]
