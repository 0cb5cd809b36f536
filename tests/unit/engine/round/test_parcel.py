"""Numbers arrive as they were sent, list by list, in one block."""

import torch

from pilotfish.engine.round.parcel import ALIGNMENT, send

CPU = torch.device("cpu")
GROUPS = (
    ([[1, -(1 << 63), (1 << 63) - 1], [], range(7)], torch.int64),
    ([[0.1, float("-inf")], [2.5]], torch.float32),
    ([[], []], torch.int32),
    ([[7]], torch.int32),
)


def test_numbers_arrive_as_they_were_sent():
    sent = send(*GROUPS, device=CPU)
    for (lists, dtype), came in zip(GROUPS, sent, strict=True):
        assert len(came) == len(lists)
        for numbers, array in zip(lists, came, strict=True):
            assert array.dtype == dtype and torch.equal(array, torch.tensor(list(numbers), dtype=dtype))
        assert came[0].data_ptr() % ALIGNMENT == 0 or not came[0].numel()
    assert len({array.untyped_storage().data_ptr() for came in sent for array in came}) == 1
