"""torch CPU tensors in the communicator: in place, any layout, bfloat16 included."""

from __future__ import annotations

import pytest

from squinchcomm.communicator import Communicator
from tests.worlds import run_world

torch = pytest.importorskip("torch")

DTYPES = "float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 bool complex64 complex128".split()


def make(rank: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    kind = getattr(torch, dtype)
    if kind == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if kind.is_complex:
        return torch.randn(shape, generator=generator, dtype=kind)
    if kind.is_floating_point:
        return torch.randn(shape, generator=generator).to(kind)
    return torch.randint(0, 20, shape, generator=generator).to(kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_of_tensors_of_every_layout(dtype: str) -> None:
    views = {
        "whole": lambda t: t,
        "transposed": lambda t: t.t(),
        "strided": lambda t: t[1::3, ::2],
        "scalar": lambda t: t[0, 0],
        "empty": lambda t: t[:0],
        "channels last": lambda t: t.reshape(2, 5, 6, 2).to(memory_format=torch.channels_last),
    }

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        out = {}
        for name, view in views.items():
            tensor = view(make(comm.rank, (12, 10), dtype))
            address = tensor.data_ptr()
            comm.allreduce(tensor)
            assert tensor.data_ptr() == address
            out[name] = tensor
        return out

    results = run_world(3, body)
    for name, view in views.items():
        parts = [view(make(rank, (12, 10), dtype)) for rank in range(3)]
        wide = torch.float64 if parts[0].dtype.is_floating_point else parts[0].dtype
        expected = sum((part.to(wide) for part in parts[1:]), parts[0].to(wide)).to(parts[0].dtype)
        for result in results:
            torch.testing.assert_close(result[name], expected)


def test_conjugate_and_gradient_tensors() -> None:
    def body(comm: Communicator) -> None:
        tensor = make(comm.rank, (50,), "complex64")
        expected = sum(make(rank, (50,), "complex64").conj() for rank in range(2))
        view = tensor.conj()
        comm.allreduce(view)
        torch.testing.assert_close(view, expected)
        leaf = torch.ones(5, requires_grad=True)
        comm.allreduce(leaf)
        assert leaf.requires_grad and torch.equal(leaf.detach(), torch.full((5,), 2.0))

    run_world(2, body)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_compressed_tensors_and_numpy_give_the_same_bits(dtype: str) -> None:
    def body(comm: Communicator) -> bytes:
        tensor = make(comm.rank, (300, 301), dtype).t()
        comm.allreduce(tensor, "avg", codec="squinch6")
        return tensor.contiguous().view(torch.uint8).numpy().tobytes()

    def numpy_body(comm: Communicator) -> bytes:
        array = make(comm.rank, (300, 301), "float32").numpy().T.copy()
        comm.allreduce(array, "avg", codec="squinch6")
        return array.tobytes()

    results = run_world(3, body)
    assert results[0] == results[1] == results[2]
    if dtype == "float32":
        assert run_world(3, numpy_body)[0] == results[0]


def test_tensors_that_cannot_be_sent_are_named() -> None:
    def body(comm: Communicator) -> None:
        for tensor, words in (
            (torch.eye(3).to_sparse(), "layout"),
            (torch.ones(3, device="meta"), "device meta"),
            (torch.zeros(3, dtype=torch.float8_e4m3fn), "dtype"),
        ):
            with pytest.raises(TypeError, match=words):
                comm.allreduce(tensor)

    run_world(1, body)
