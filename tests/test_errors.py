import pickle

from gradweave.errors import ArgumentError, GradweaveError, LostPeerError, ScheduleError


def test_one_base_class_catches_everything():
    assert issubclass(ArgumentError, GradweaveError)
    assert issubclass(ScheduleError, GradweaveError)


def test_an_argument_error_names_argument_value_and_remedy():
    error = ArgumentError("k", 9, "give 0 to 8")
    assert str(error) == "k=9: give 0 to 8"
    assert isinstance(error, ValueError)


def test_errors_survive_being_sent_between_processes():
    error = pickle.loads(pickle.dumps(ArgumentError("k", 9, "give 0 to 8")))
    assert (error.argument, error.value, error.remedy) == ("k", 9, "give 0 to 8")


def test_a_lost_peer_survives_being_sent_between_processes():
    error = pickle.loads(pickle.dumps(LostPeerError("rank 3 is lost", ranks=(3,), step=7, checkpoint="rank0.pt")))
    assert (str(error), error.ranks, error.step, error.checkpoint) == ("rank 3 is lost", (3,), 7, "rank0.pt")
