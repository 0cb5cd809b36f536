"""The head that is trained against the head that is served, and its loss against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pilotfish.draft_heads.training.loss import ARGMAX_SHARE, LEAST_REACH, ROWS_AT_ONCE, DraftLoss
from pilotfish.draft_heads.training.module import TrainableHead
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.model.build import CacheSizes, build_model, with_head
from pilotfish.engine.round.prompt import PromptPass
from pilotfish.kernels.attention import PAGE
from tests.support.tiny_models import build_tiny
from tests.support.windows import Windows

LENGTH, DEPTHS, NUM_PAGES = PAGE + 20, 4, 3
# fp32 sums in other orders, through a layer and the recursion on its output
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e3,
    "partial_rotary_factor": 0.25,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module", params=["hv_gt_hk", "moe", "yarn"])
def heads(request, tmp_path_factory):
    """The trainable head with the checkpoint's weights, and the served model with the same."""
    kind, rope = ("dense", {"rope_parameters": YARN}) if request.param == "yarn" else (request.param, {})
    checkpoint = open_checkpoint(build_tiny(tmp_path_factory.mktemp("model"), kind, **rope))
    weights = load_weights(checkpoint, progress=False)
    own = {name: weights.pop(name) for name in list(weights) if name.startswith("mtp.")}
    trainable = TrainableHead(checkpoint.config)
    trainable.load_state_dict({name.removeprefix("mtp."): weight for name, weight in own.items()})
    trunk = build_model(weights, checkpoint.config, CacheSizes(2, 2, 1), torch.float32, torch.device("cpu"))
    return trainable, with_head(trunk, own, NUM_PAGES)


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
    prompt = PromptPass(model)
    served = prompt.fill(tokens[:LENGTH], hidden, prompt.span(1, 0, LENGTH, [1, 2]))
    torch.testing.assert_close(unrolled(trainable, model, tokens, hidden)[0], served, **CLOSE)


@torch.inference_mode()
@pytest.mark.parametrize("start", [0, 1, PAGE - 2, PAGE, LENGTH - 1])
def test_deeper_depths_are_the_served_recursion(heads, pairs, start):
    trainable, model = heads
    tokens, hidden = pairs
    wanted = unrolled(trainable, model, tokens, hidden)[:, start]
    prompt, windows = PromptPass(model), Windows(model)
    rows = prompt.fill(tokens[: start + 1], hidden[: start + 1], prompt.span(1, 0, start + 1, [1, 2]))
    row = rows[-1:]
    for depth in range(1, DEPTHS):
        token = tokens[start + depth : start + depth + 1]
        (row,) = windows.head(token[None], row[None], [1], [start + depth], [[1, 2]])
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
    DEPTHS, NUM, HIDDEN, VOCAB = 3, ROWS_AT_ONCE + 7, 16, 50

    @pytest.fixture
    def values(self):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=generator)

        keep = torch.rand(self.DEPTHS, self.NUM, generator=generator) < 0.7
        drafts = draw(self.DEPTHS, self.NUM, self.HIDDEN).requires_grad_()
        lm_head = draw(self.VOCAB, self.HIDDEN)
        # mostly what drafts think likely, so that deeper ones are reached
        text = (drafts[0] @ lm_head.T + draw(self.NUM, self.VOCAB)).argmax(1)
        drafts.data[1:] += 3 * lm_head[text]
        return drafts, keep, draw(self.NUM, self.HIDDEN), text, lm_head

    def target(self, teacher, text, lm_head, kind):
        if kind == "text":
            return F.one_hot(text, self.VOCAB).float()
        p = (teacher @ lm_head.T).softmax(1)
        return (1 - ARGMAX_SHARE) * p + ARGMAX_SHARE * F.one_hot(p.argmax(1), self.VOCAB)

    def reaches(self, drafts, keep, text, lm_head):
        """Chain by chain."""
        logits, reach = drafts.detach() @ lm_head.T, torch.zeros(self.DEPTHS, self.NUM)
        for start in range(self.NUM):
            chance = torch.tensor(1.0)
            for depth, place in enumerate(range(start, min(start + self.DEPTHS, self.NUM))):
                if not keep[depth, place] or chance <= LEAST_REACH:
                    break
                reach[depth, place] = chance
                chance = chance * logits[depth, place].softmax(0)[text[place]]
        return reach

    @pytest.mark.parametrize("kind", ["trunk", "text"])
    def test_equals_torchs_cross_entropy_and_its_gradient(self, values, kind):
        drafts, keep, teacher, text, lm_head = values
        target, factors = self.target(teacher, text, lm_head, kind), torch.tensor([1.0, 0.5, 2.0])
        reach = self.reaches(drafts, keep, text, lm_head)
        assert ((reach > 0).sum(1) > 30).all() and ((reach[1:] > 0) & (reach[1:] < 0.9)).any()
        entropies = torch.stack([F.cross_entropy(d @ lm_head.T, target, reduction="none") for d in drafts])
        wanted = (entropies * reach).sum(1) / keep.sum(1)
        (wanted * factors).sum().backward()
        gradient, drafts.grad = drafts.grad, None
        got, shares = DraftLoss.apply(drafts, keep, teacher if kind == "trunk" else None, text, lm_head)
        (got * factors).sum().backward()
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(drafts.grad, gradient, rtol=1e-4, atol=1e-7)
        agree = (drafts @ lm_head.T).argmax(2) == target.argmax(1)
        torch.testing.assert_close(shares, (agree * reach).sum(1) / reach.sum(1))

    def test_of_equal_logits_the_lowest_id_is_the_first_choice(self):
        hidden, lm_head = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [2.0, 1.0], [2.0, 1.0]])
        drafts, keep, text = hidden.flip(0)[None], torch.ones(1, 2, dtype=torch.bool), torch.tensor([0, 2])
        # the rows of `hidden` choose ids 1 and 0
        for rows, teacher, share in ((drafts, hidden, 0.0), (hidden[None], hidden, 1.0), (drafts, None, 0.5)):
            _, shares = DraftLoss.apply(rows.contiguous(), keep, teacher, text, lm_head)
            assert shares.tolist() == [share]

    def test_nothing_is_reached_behind_a_draft_that_was_wrong(self):
        lm_head = torch.eye(2)
        drafts, keep = 20 * torch.tensor([[[1.0, 0.0]] * 3] * 2), torch.ones(2, 3, dtype=torch.bool)
        losses, shares = DraftLoss.apply(drafts, keep, None, torch.tensor([1, 1, 0]), lm_head)
        assert losses[0] > 10 and losses[1] == 0 and shares[1] == 0
