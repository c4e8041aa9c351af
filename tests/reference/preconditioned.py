"""Shampoo with Adam's grafting and SOAP, written out slowly from all gradients so far."""

import torch


def averaged(history, beta):
    """Return the running average of some tensors, corrected for its start at zero."""
    weights = [(1 - beta) * beta ** (len(history) - 1 - at) for at in range(len(history))]
    return sum(w * one for w, one in zip(weights, history, strict=True)) / (1 - beta ** len(history))


def power(matrix, exponent, eps):
    U, S, _ = torch.linalg.svd(matrix + eps * torch.eye(len(matrix), dtype=matrix.dtype))
    return U @ torch.diag(S**exponent) @ U.t()


def adam_step(history, betas, eps):
    return averaged(history, betas[0]) / (averaged([g * g for g in history], betas[1]).sqrt() + eps)


def shampoo(W, gradients, *, lr, betas, shampoo_beta, eps, root_eps, weight_decay, refresh, sides=(0, 1)):
    """Return a matrix after steps along given gradients."""
    roots = {side: torch.eye(W.shape[side], dtype=W.dtype) for side in sides}
    for t in range(1, len(gradients) + 1):
        seen = gradients[:t]
        P = averaged(seen, betas[0])
        if 0 in roots:
            P = roots[0] @ P
        if 1 in roots:
            P = P @ roots[1]
        grafted = adam_step(seen, betas, eps)
        W = W - lr * weight_decay * W - lr * P * grafted.norm() / P.norm()
        if t == 1 or t % refresh == 0:
            for side in sides:
                moments = [g @ g.t() if side == 0 else g.t() @ g for g in seen]
                roots[side] = power(averaged(moments, shampoo_beta), -1 / (2 * len(sides)), root_eps)
    return W


def soap(W, gradients, *, lr, betas, eps, weight_decay, refresh):
    """Return a matrix after steps along given gradients; both bases act on the flat gradient as one large matrix."""
    beta = betas[1]
    L, R = ((1 - beta) * product for product in (gradients[0] @ gradients[0].t(), gradients[0].t() @ gradients[0]))
    bases = [torch.linalg.eigh(moment)[1].flip(1) for moment in (L, R)]
    second = torch.zeros(W.numel(), dtype=W.dtype)
    for t, g in enumerate(gradients[1:], 1):
        turn = torch.kron(*bases).t()
        second = beta * second + (1 - beta) * (turn @ g.reshape(-1)) ** 2
        mean = averaged(gradients[1 : t + 1], betas[0])
        adam = (turn @ mean.reshape(-1)) / ((second / (1 - beta**t)).sqrt() + eps)
        W = W - lr * weight_decay * W - lr * (turn.t() @ adam).view(W.shape)
        L, R = beta * L + (1 - beta) * g @ g.t(), beta * R + (1 - beta) * g.t() @ g
        if (t + 1) % refresh == 0:
            table = second.view(W.shape)
            for side, moment in enumerate((L, R)):
                sizes = torch.diag(bases[side].t() @ moment @ bases[side])
                order = sizes.argsort(descending=True)
                bases[side] = torch.linalg.qr(moment @ bases[side][:, order])[0]
                table = table[order] if side == 0 else table[:, order]
            second = table.reshape(-1)
    return W
