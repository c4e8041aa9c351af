"""The state of an optimizer whose updates are pending."""

import copy
from collections import defaultdict

from _runtime.deferred.comparison import LONG, same
from gradweave._runtime.deferred.pending_state import PendingState


def test_a_state_that_is_replaced_while_updates_are_pending():
    def reset(i, model, optimizer, x):
        if i == 4:
            optimizer.state = defaultdict(dict)

    same(reset)
    same(reset, mode="auto", steps=LONG)


def test_the_state_of_an_optimizer_is_a_dictionary_like_any_other():
    def look(i, model, optimizer, x):
        state = optimizer.state
        return [len(copy.copy(state)), len(state | {}), len({} | state), len(list(reversed(state))), state != {}]

    same(look)


def test_a_state_that_a_loop_makes_of_its_type_is_a_plain_one():
    state = PendingState(lambda: defaultdict(dict))
    made = type(state)(dict)
    assert type(made) is defaultdict
    assert made["anything"] == {}
