"""Tables of addresses: what a captured graph reads stays as it was."""

import torch

from gradweave.optim.kernels.addresses import Addresses


class Kernels:
    """Writes as the kernel does, at once."""

    launches = 0

    @property
    def write_numbers(self):
        def launch(table, start, *numbers):
            self.launches += 1
            table[start : start + len(numbers)] = torch.tensor(numbers)

        return {(1,): launch}


def hold(addresses, numbers, kernels, *, capturing=False, moves=False):
    table = addresses.holding(numbers, kernels, capturing=capturing, moves=moves)
    assert table[: len(numbers)].tolist() == numbers
    return table


def test_what_is_known_is_not_written_again():
    addresses, kernels = Addresses(40, torch.device("cpu")), Kernels()
    numbers = list(range(1, 41))
    hold(addresses, numbers, kernels)
    assert kernels.launches == 2
    hold(addresses, numbers, kernels)
    hold(addresses, [*numbers[:39], 7], kernels)
    assert kernels.launches == 3


def test_a_graph_shares_what_stays_and_keeps_it_when_others_step():
    addresses, kernels = Addresses(3, torch.device("cpu")), Kernels()
    eager = hold(addresses, [1, 2, 3], kernels)
    graph = hold(addresses, [1, 2, 3], kernels, capturing=True)
    assert graph is eager
    other = hold(addresses, [4, 5, 6], kernels)
    assert graph[:3].tolist() == [1, 2, 3]
    hold(addresses, [7, 8, 9], kernels)
    assert other[:3].tolist() == [7, 8, 9]
    assert graph[:3].tolist() == [1, 2, 3]


def test_a_graph_has_a_table_of_its_own_of_what_moves():
    addresses, kernels = Addresses(3, torch.device("cpu")), Kernels()
    eager = hold(addresses, [1, 2, 3], kernels, moves=True)
    graph = hold(addresses, [1, 2, 3], kernels, capturing=True, moves=True)
    hold(addresses, [4, 5, 6], kernels, moves=True)
    assert graph is not eager
    assert graph[:3].tolist() == [1, 2, 3]
