"""Arrays of any dtype and shape arrive as they were sent, in one block."""

import torch

from pilotfish.engine.round.parcel import ALIGNMENT, send

CPU = torch.device("cpu")


def test_arrays_arrive_as_they_were_sent():
    arrays = [
        torch.tensor([1, -(1 << 63), (1 << 63) - 1]),
        torch.tensor([0.1, float("-inf")], dtype=torch.float32),
        torch.zeros((0, 5), dtype=torch.int64),
        torch.arange(7, dtype=torch.int32),
        torch.tensor([[True, False, True]]),
        torch.arange(6).view(2, 3),
    ]
    sent = send(arrays, CPU)
    for array, came in zip(arrays, sent, strict=True):
        assert came.dtype == array.dtype and came.shape == array.shape and torch.equal(came, array)
        assert came.data_ptr() % ALIGNMENT == 0 or not came.numel()
    assert len({came.untyped_storage().data_ptr() for came in sent}) == 1


def test_what_is_sent_is_not_what_was_given():
    array = torch.tensor([1, 2])
    (came,) = send([array], CPU)
    array[0] = 5
    assert came.tolist() == [1, 2]
