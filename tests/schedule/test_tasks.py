from gradweave.schedule import Kind, Task


def test_labels_say_which_task():
    assert Task(Kind.W, 3, 1.0, microbatch=2, step=1).label == "W(layer 3, micro-batch 2, step 1)"
    merged = Task(Kind.C, 3, 1.0, layers=4, note="exchange")
    assert merged.label == "C(layer 3-6, micro-batch 0, step 0 exchange)"
