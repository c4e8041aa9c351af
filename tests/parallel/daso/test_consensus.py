"""Votes over a real store, from threads that stand for nodes."""

import json
import threading
import time
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from gradweave.errors import LostPeerError
from gradweave.parallel.daso import consensus
from gradweave.parallel.daso.consensus import Agreement, Connections, Verdict, VerdictCodec, Vote
from gradweave.parallel.daso.rhythm import Figures
from parallel.daso.clock import Clockless


def together(*calls):
    results = [None] * len(calls)

    def run(index):
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def nodes(count, timeout=15.0, gone=None):
    """Nodes with a store; no node waits for those that are gone, as if the timeout were over."""
    store = dist.HashStore()
    if gone is not None:
        store = Clockless(store, gone.__contains__, lambda: agreements[0].members.nodes)
    agreements = [
        Agreement(Connections(lambda: store), node=node, nodes=range(count), timeout=timeout) for node in range(count)
    ]
    return agreements


def test_an_exchange_that_all_nodes_have_counts():
    votes = [Vote(True, figures=Figures(seconds=s, compute=1.0, lr=0.1), state=3) for s in (2.0, 3.0, 4.0)]
    verdicts = together(*(lambda a=a, v=v: a.vote(0, v) for a, v in zip(nodes(3), votes, strict=True)))
    assert len({replace(verdict, figures=None) for verdict in verdicts}) == 1
    assert (verdicts[0].counted, verdicts[0].contributing, verdicts[0].state) == (True, 3, 3)
    assert (verdicts[0].figures.seconds, verdicts[0].figures.compute) == (2.0, 1.0)
    assert verdicts[0].alive == (0, 1, 2)


def test_an_exchange_that_one_node_lacks_counts_for_none():
    first, second, third = nodes(3)
    verdicts = together(
        lambda: first.vote(0, Vote(True)), lambda: second.vote(0, Vote(False)), lambda: third.vote(0, Vote(True))
    )
    assert [(v.counted, v.alive) for v in verdicts] == [(False, (0, 1, 2))] * 3


def test_a_node_that_does_not_answer_is_lost_and_learns_of_it_when_it_comes():
    first, second, third = nodes(3, gone=[2])
    verdicts = together(lambda: first.vote(0, Vote(True)), lambda: second.vote(0, Vote(True)))
    assert [(v.counted, v.alive) for v in verdicts] == [(False, (0, 1))] * 2
    late = third.vote(0, Vote(True))
    assert (late.counted, late.alive) == (False, (0, 1))
    for node in (first, second):
        node.regrouped((0, 1))
    verdicts = together(lambda: first.vote(1, Vote(True)), lambda: second.vote(1, Vote(True, done=True)))
    assert [(v.counted, v.contributing, v.done) for v in verdicts] == [(True, 2, False)] * 2


def test_a_node_that_never_answers_is_waited_for_no_longer_than_the_timeout():
    first, _ = nodes(2, timeout=0.5)
    began = time.monotonic()
    assert first.vote(0, Vote(True)).alive == (0,)
    assert time.monotonic() - began > 1.2, "a timeout for its vote, and one and a half for the roll call"


def test_a_node_that_hears_of_the_loss_a_timeout_later_still_takes_part(monkeypatch):
    first, second, _ = nodes(3, timeout=20.0)
    clock, verdicts = Clock(), []
    later = threading.Thread(target=lambda: verdicts.append(second.vote(0, Vote(False))))

    def arrive():
        later.start()
        while not later_has_answered():
            time.sleep(0.01)

    def later_has_answered():
        with first._stores.one() as store:
            return store.check(["generation/0/1"])

    clock.at(23.0, arrive)
    monkeypatch.setattr(consensus, "time", clock)
    verdicts.append(first.vote(0, Vote(False)))
    later.join(60)
    assert [(v.counted, v.alive) for v in verdicts] == [(False, (0, 1))] * 2
    assert clock.now > 23.0


class Clock:
    """Stands for the module ``time``: a second passes as soon as a thread sleeps."""

    def __init__(self):
        self.now, self._due, self._lock = 0.0, [], threading.Lock()

    def at(self, when, call):
        """Make a call at a time; it takes no longer than the next second does."""
        self._due.append((when, call))

    def monotonic(self):
        return self.now

    def sleep(self, _):
        with self._lock:
            self.now += 1.0
            due = [call for when, call in self._due if when <= self.now]
            self._due = [item for item in self._due if item[0] > self.now]
        for call in due:
            call()
        time.sleep(0.001)


def test_what_differs_is_said():
    first, second = nodes(2)
    votes = [Vote(True, state=1, contributes=False, done=True), Vote(True, state=2, finite=False, done=True)]
    verdicts = together(lambda: first.vote(7, votes[0]), lambda: second.vote(7, votes[1]))
    assert [(v.state, v.broken, v.contributing, v.done) for v in verdicts] == [(-1, 1, 1, True)] * 2


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(True, 2, False, 5, -1, Figures(1.0, 2.0, 3.0, 4.0, 5.0), (0, 2), 7),
        Verdict(True, done=True, state=2**40, broken=2, alive=(0, 1, 2), steps=2**31, figures=Figures(*[0.5] * 5)),
        Verdict(False, broken=consensus.OVERFLOW, figures=Figures(*[0.0] * 5)),
    ],
)
def test_ranks_without_a_store_get_the_verdict_as_numbers(verdict):
    codec = VerdictCodec(nodes=3)
    encoded = codec.encode(verdict)
    assert len(encoded) == codec.length
    assert all(type(number) is float for number in encoded)
    decoded = codec.decode(encoded)
    assert decoded == verdict
    assert [type(value) for value in vars(decoded).values()] == [type(value) for value in vars(verdict).values()]


def test_a_verdict_goes_through_json():
    verdict = Verdict(True, 2, figures=Figures(*[0.5] * 5), alive=(0, 2), steps=7)
    assert Verdict.of(json.loads(json.dumps(asdict(verdict)))) == verdict


def test_a_node_may_vote_on_two_exchanges_at_a_time():
    """On one connection, waiting for the verdict on the first would keep it from voting on the second."""
    host = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=20))
    first, second = (
        Agreement(Connections(host.clone, ready=2), node=node, nodes=range(2), timeout=8.0) for node in range(2)
    )

    def one_after_the_other(consensus, order):
        results = together(
            *(lambda n=n: (time.sleep(0.4 * order.index(n)), consensus.vote(n, Vote(True)))[1] for n in order)
        )
        return [result.counted for result in results]

    began = time.monotonic()
    verdicts = together(lambda: one_after_the_other(first, [0, 1]), lambda: one_after_the_other(second, [1, 0]))
    assert verdicts == [[True, True]] * 2
    assert time.monotonic() - began < 8


def test_two_failures_at_a_time_are_one_roll_call():
    gone = []
    first, second = nodes(2, gone=gone)
    then = first.members
    verdicts = together(lambda: first.vote(0, Vote(False), then), lambda: second.vote(0, Vote(False), then))
    assert [verdict.alive for verdict in verdicts] == [(0, 1)] * 2
    for node in (first, second):
        node.regrouped((0, 1))
    gone.append(0)
    late = together(lambda: first.vote(1, Vote(False), then), lambda: second.vote(1, Vote(False)))
    assert late[0].alive == (0, 1), "the roll that was called already holds"


def test_the_host_of_the_store_waits_for_the_others_but_not_for_ever():
    first, second = nodes(2, timeout=1.0)
    began = time.monotonic()
    first.leave(2, host=True)
    assert 0.9 < time.monotonic() - began < 20
    first, second = nodes(2, timeout=60.0)
    left = []
    host = threading.Thread(target=lambda: (first.leave(2, host=True), left.append("host")))
    host.start()
    host.join(0.3)
    assert not left
    second.leave(2, host=False)
    host.join(20)
    assert left == ["host"]


def test_a_store_that_is_gone_says_so():
    host = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=2))
    client = host.clone()
    del host
    agreement = Agreement(Connections(lambda: client), node=0, nodes=range(2), timeout=1)
    with pytest.raises(LostPeerError, match="hosts the store"):
        agreement.vote(0, Vote(True))


def test_votes_do_not_pile_up():
    first, second = nodes(2)
    for number in range(6):
        together(
            lambda number=number: first.vote(number, Vote(True)), lambda number=number: second.vote(number, Vote(True))
        )
    assert first._stores._free[0].num_keys() <= 3 * 4
