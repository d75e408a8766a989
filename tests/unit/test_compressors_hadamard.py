"""The block transform against a matrix built by Kronecker products."""

import pytest
import torch

from megatron_taco.compressors.hadamard import hadamard_, sum_of_squares

SIZES = (2, 32, 64, 128, 256, 512)


def sylvester(block: int) -> torch.Tensor:
    """Return H_B of +1 and -1, natural order, FP64."""
    seed = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < block:
        matrix = torch.kron(seed, matrix)
    return matrix


@pytest.mark.parametrize("block", SIZES)
@pytest.mark.parametrize("count", [1, 3])
def test_transform_is_the_orthonormal_sylvester_matrix(block, count):
    x = torch.randn(block, count, generator=torch.Generator().manual_seed(block))
    expected = sylvester(block) @ x.double() / block**0.5
    assert torch.allclose(hadamard_(x.clone()).double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("block", SIZES)
def test_each_unit_vector_gives_its_column_exactly(block):
    expected = sylvester(block).float() * torch.tensor(1 / block**0.5)
    assert torch.equal(hadamard_(torch.eye(block)), expected)


@pytest.mark.parametrize("block", SIZES)
def test_transform_is_its_own_inverse_and_keeps_the_norm(block):
    x = torch.randn(block, 5, generator=torch.Generator().manual_seed(block + 1))
    y = hadamard_(x.clone())
    assert torch.allclose(y.norm(dim=0), x.norm(dim=0), rtol=1e-6)
    assert torch.allclose(hadamard_(y), x, rtol=0, atol=3e-6)


def test_sum_of_squares_is_by_four_then_pairwise_and_in_no_other_order():
    x = torch.tensor([2.0**12, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]).unsqueeze(1)
    assert sum_of_squares(x).item() == 2.0**24 + 2  # ((2^24 + 1) + 1) + 1 -> 2^24, and 2
    assert sum_of_squares(x.flip(0)).item() == 2.0**24 + 6  # 2, and 3 + 2^24 -> 2^24 + 4
    y = torch.randn(256, 7, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(sum_of_squares(y).double(), y.double().square().sum(0), rtol=1e-6)
