"""Small systems of linear equations."""

from __future__ import annotations

from collections.abc import Sequence


def inverse(matrix: list[list[float]]) -> list[list[float]]:
    """The inverse, row by row."""
    size = len(matrix)
    units = [[float(row == column) for row in range(size)] for column in range(size)]
    columns = [solved(matrix, unit) for unit in units]
    return [[columns[column][row] for column in range(size)] for row in range(size)]


def solved(matrix: list[list[float]], right: Sequence[float]) -> list[float]:
    """x of matrix x = right, by Gaussian elimination; a matrix of full rank."""
    rows = [[*values, one] for values, one in zip(matrix, right, strict=True)]
    size = len(rows)
    for pivot in range(size):
        best = max(range(pivot, size), key=lambda row: abs(rows[row][pivot]))
        rows[pivot], rows[best] = rows[best], rows[pivot]
        for row in range(pivot + 1, size):
            factor = rows[row][pivot] / rows[pivot][pivot]
            rows[row] = [a - factor * b for a, b in zip(rows[row], rows[pivot], strict=True)]
    answer = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][column] * answer[column] for column in range(row + 1, size))
        answer[row] = (rows[row][size] - known) / rows[row][row]
    return answer
