"""The optimizer's fast path against its plain twin."""

import pytest

torch = pytest.importorskip("torch")

from trainer.optimizer import orthogonalise  # noqa: E402


def plain(matrix, iterations=5):
    """Newton-Schulz as it is written down: the whole matrix in every iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / matrix.norm()
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(8, 8), (24, 64), (64, 24), (1, 5)])
def test_iterating_on_the_gram_matrix_is_the_same(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(orthogonalise(matrix), plain(matrix), atol=1e-6)


def test_singular_values_come_out_near_one():
    matrix = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.min() > 0.6 and values.max() < 1.3
