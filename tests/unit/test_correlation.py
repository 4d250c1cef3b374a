"""The statistical matrix Z against examples worked out by hand."""

import pytest
import torch

from csc.nets.correlation import statistical_cm

PRIOR_CM = torch.tensor([[0.9, 0.1], [0.2, 0.8]])


def test_the_base_matrix_equals_the_example_worked_out_by_hand():
    # Classes a, b, c. Images: a and b together twice, a alone once, b and c together twice, c alone four times.
    labels = torch.tensor(
        [[1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]]
    )
    # N_a = 3, N_b = 4, N_c = 6; N_ab = 2, N_bc = 2, N_ac = 0.
    # P(a|b) = 2/4 and P(c|b) = 2/4 exceed 0.4, so does P(b|a) = 2/3; P(b|c) = 2/6 does not.
    # Each column shares 0.28: column a gives it all to b; column b halves it; column c has no edge. With self-loops:
    #          a     b     c    row sum
    #     a    1   0.14    0     1.14
    #     b  0.28    1     0     1.28
    #     c    0   0.14    1     1.14
    # Result (i, j) = D_i^-0.8 · A(j, i) · D_j^-0.8.
    a, b, c = 1.14**-0.8, 1.28**-0.8, 1.14**-0.8
    expected = [
        [a * 1 * a, a * 0.28 * b, 0],
        [b * 0.14 * a, b * 1 * b, b * 0.14 * c],
        [0, 0, c * 1 * c],
    ]
    torch.testing.assert_close(statistical_cm(labels), torch.tensor(expected), rtol=1e-5, atol=1e-6)


# Old classes p, q; new classes x, y. Soft scores of the prior model next to the labels of four images.
LABELS = torch.tensor([[1, 0], [1, 0], [1, 1], [0, 1]])
SCORES = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9], [0.2, 0.8]])


def test_the_second_matrix_equals_the_example_worked_out_by_hand():
    # N_x = 3, N_y = 2, N_xy = 1, N = 4.
    # old-new: P(p|x) = (0.9 + 0.9 + 0.1) / 3 = 0.633, P(q|x) = (0.1 + 0.1 + 0.9) / 3 = 0.367,
    #   P(p|y) = (0.1 + 0.2) / 2 = 0.15, P(q|y) = (0.9 + 0.8) / 2 = 0.85.
    #   Above 0.3: all but P(p|y). Each column shares 0.25: x halves it, y gives it to q.
    old_new = [[0.125, 0.0], [0.125, 0.25]]
    # new-old: P(x) = 3/4, P(y) = 2/4, P(p) = 2.1/4 = 0.525, P(q) = 1.9/4 = 0.475; Bayes, halved:
    #   P(x|p) = 0.633 · 0.75 / 0.525 / 2 = 0.452, P(x|q) = 0.367 · 0.75 / 0.475 / 2 = 0.289 (0.579 before halving),
    #   P(y|p) = 0.15 · 0.5 / 0.525 / 2 = 0.071,   P(y|q) = 0.85 · 0.5 / 0.475 / 2 = 0.447.
    #   Above 0.3: P(x|p) and P(y|q), each alone in its column.
    new_old = [[0.25, 0.0], [0.0, 0.25]]
    # new-new: P(x|y) = 1/2 exceeds 0.4, P(y|x) = 1/3 does not. With self-loops:
    #          x     y    row sum
    #     x    1   0.25    1.25
    #     y    0     1     1
    # Result (i, j) = D_i^-0.5 · A(j, i) · D_j^-0.5.
    new_new = [[1 / 1.25, 0.0], [0.25 / 1.25**0.5, 1.0]]
    top = torch.cat([PRIOR_CM, torch.tensor(old_new)], dim=1)
    bottom = torch.cat([torch.tensor(new_old), torch.tensor(new_new)], dim=1)
    matrix = statistical_cm(LABELS, SCORES.log(), PRIOR_CM)
    torch.testing.assert_close(matrix, torch.cat([top, bottom]), rtol=1e-5, atol=1e-6)


def test_scores_are_a_softmax_so_a_shift_of_all_logits_changes_nothing():
    logits = SCORES.log()
    shifted = logits + torch.tensor([[-3.0], [0.0], [2.0], [50.0]])
    expected = statistical_cm(LABELS, logits, PRIOR_CM)
    torch.testing.assert_close(statistical_cm(LABELS, shifted, PRIOR_CM), expected)


def test_the_old_block_is_the_matrix_of_the_task_before():
    prior = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 2, (20, 3), generator=torch.Generator().manual_seed(1))
    logits = torch.randn(20, 4, generator=torch.Generator().manual_seed(2))
    before = prior.clone()
    assert torch.equal(statistical_cm(labels, logits, prior)[:4, :4], prior)
    assert torch.equal(prior, before)


@pytest.mark.parametrize(("old", "new"), [(0, 1), (0, 5), (1, 1), (4, 2), (2, 4)])
def test_the_matrix_has_one_row_and_column_per_seen_class(old: int, new: int):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (12, new), generator=generator)
    prior = (torch.randn(12, old, generator=generator), torch.eye(old)) if old else (None, None)
    matrix = statistical_cm(labels, *prior)
    assert matrix.shape == (old + new, old + new)
    assert matrix.dtype == torch.float32
    assert matrix.isfinite().all()


def test_a_class_without_an_image_stands_alone_and_divides_nothing_by_zero():
    matrix = statistical_cm(torch.tensor([[1, 0, 1], [1, 0, 1]]))
    assert matrix.isfinite().all()
    assert torch.equal(matrix[1], torch.tensor([0.0, 1.0, 0.0]))
    assert matrix[0, 2] > 0


def test_labels_may_be_booleans_as_a_view_gives_them():
    labels = LABELS.bool()
    assert torch.equal(statistical_cm(labels), statistical_cm(LABELS))
    assert torch.equal(labels, LABELS.bool())
