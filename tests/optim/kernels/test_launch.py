"""Tables of addresses: what a captured graph reads stays as it was."""

from types import SimpleNamespace

import pytest
import torch

from gradweave.optim.kernels import launch
from gradweave.optim.kernels.launch import AddressTable


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """First addresses of all launches; the kernel is one that writes on the CPU, at once."""
    starts = []

    def write_addresses(table, start, *addresses):
        starts.append(start)
        table[start : start + len(addresses)] = torch.tensor(addresses)

    kernels = SimpleNamespace(write_addresses={(1,): write_addresses})
    monkeypatch.setattr(launch, "triton_module", lambda _: kernels)
    return starts


def write(table, addresses, *, capturing=False, changes_each_step=False):
    written = table.write(addresses, capturing=capturing, changes_each_step=changes_each_step)
    assert written[: len(addresses)].tolist() == addresses
    return written


def test_addresses_that_have_not_changed_are_not_written_again(launches):
    table = AddressTable(40, torch.device("cpu"))
    addresses = list(range(1, 41))
    write(table, addresses)
    assert launches == [0, 32]
    write(table, addresses)
    write(table, [*addresses[:39], 7])
    assert launches == [0, 32, 32]


def test_a_graph_shares_addresses_that_stay_and_keeps_them_when_eager_steps_change_theirs():
    table = AddressTable(3, torch.device("cpu"))
    eager = write(table, [1, 2, 3])
    graph = write(table, [1, 2, 3], capturing=True)
    assert graph is eager
    other = write(table, [4, 5, 6])
    assert graph[:3].tolist() == [1, 2, 3]
    write(table, [7, 8, 9])
    assert other[:3].tolist() == [7, 8, 9]
    assert graph[:3].tolist() == [1, 2, 3]


def test_a_graph_has_a_table_of_its_own_for_addresses_that_change_each_step(launches):
    table = AddressTable(3, torch.device("cpu"))
    eager = write(table, [1, 2, 3], changes_each_step=True)
    graph = write(table, [1, 2, 3], capturing=True, changes_each_step=True)
    assert launches == [0, 0]
    write(table, [4, 5, 6], changes_each_step=True)
    assert graph is not eager
    assert graph[:3].tolist() == [1, 2, 3]


def test_only_cuda_devices_have_kernels_and_capture():
    cpu = torch.device("cpu")
    assert not launch.has_kernels(cpu)
    assert not launch.is_capturing(cpu)
    with launch.on_device(cpu):
        pass
