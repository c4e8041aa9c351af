from gradweave.schedule.shapes import LayerShape


def test_a_layer_without_weightless_work_beside_it_is_the_default():
    assert LayerShape("fc", "head", 6, 2, 3, 9).extra_multiplies == 0
