"""K-FAC, FOOF and Shampoo written out slowly for one step from nothing, from their published formulas."""

import torch


def moments(rows):
    """The mean outer product of rows."""
    return sum(torch.outer(row, row) for row in rows) / len(rows)


def kfac_direction(G, input_rows, output_rows, samples, damping):
    """G between the damped inverses of both factors.

    Args:
        G: Gradient of a mean loss, with the bias' column.
        input_rows: Of all places, with ones for the bias.
        output_rows: The gradient of the mean loss by the output, of all places.
        samples: Number of samples; per-sample gradients are that many times those of the mean.
        damping: Of the whole matrix.
    """
    places_per_sample = len(input_rows) / samples
    A = moments(input_rows) * places_per_sample
    B = moments(output_rows * samples)
    pi = ((A.trace() / len(A)) / (B.trace() / len(B))).sqrt()
    A = A + pi * damping**0.5 * torch.eye(len(A), dtype=A.dtype)
    B = B + damping**0.5 / pi * torch.eye(len(B), dtype=B.dtype)
    whole = torch.kron(B, A)
    return torch.linalg.solve(whole, G.reshape(-1)).reshape(G.shape)


def foof_direction(G, input_rows, damping):
    A = moments(input_rows)
    return torch.linalg.solve(A + damping * torch.eye(len(A), dtype=A.dtype), G.t()).t()


def shampoo_direction(history, damping):
    """The last of some gradients, preconditioned by the moments of all, with its own norm."""
    G = history[-1]
    P = G
    for mode in range(G.dim()):
        L = damping * torch.eye(G.shape[mode], dtype=G.dtype)
        for g in history:
            unfolded = g.movedim(mode, 0).flatten(1)
            L = L + unfolded @ unfolded.t()
        values, vectors = torch.linalg.eigh(L)
        root = vectors @ torch.diag(values ** (-1 / (2 * G.dim()))) @ vectors.t()
        P = torch.tensordot(root, P.movedim(mode, 0), dims=1).movedim(0, mode)
    return P * G.norm() / P.norm()
