"""Random networks, scenarios and schedules."""

from hypothesis import strategies as st

from gradweave.schedule import (
    Buffer,
    Cluster,
    Costs,
    Demand,
    Discipline,
    Family,
    Kind,
    Lane,
    LayerCost,
    Link,
    Schedule,
    Task,
    TaskGraph,
    data_parallel,
    hierarchical,
    pipeline,
    single,
)

seconds = st.one_of(st.integers(0, 5).map(float), st.floats(0, 10, allow_subnormal=False))
shares = st.floats(0, 1, allow_subnormal=False)
demands = st.builds(Demand, shares, shares)
sizes = st.integers(0, 100)
links = st.one_of(
    st.just(Link()),
    st.builds(Link, st.floats(0.5, 100), st.one_of(st.just(0.0), st.floats(0, 1, allow_subnormal=False))),
)


@st.composite
def costs(draw, max_layers: int = 9) -> Costs:
    count = draw(st.integers(1, max_layers))
    block = draw(st.integers(1, 4))
    layers = [
        LayerCost(
            f"layer{i}",
            *(draw(seconds) for _ in range(4)),
            *(draw(sizes) for _ in range(3)),
            block=f"block{i // block}",
            forward_demand=draw(demands),
            input_grad_demand=draw(demands),
            weight_grad_demand=draw(demands),
            update_demand=draw(demands),
        )
        for i in range(count)
    ]
    return Costs(tuple(layers))


@st.composite
def graphs(draw, family: Family) -> TaskGraph:
    network = draw(costs())
    steps, next_forward = draw(st.integers(1, 3)), draw(st.booleans())
    if family is Family.SINGLE:
        return single(network, steps=steps, next_forward=next_forward)
    link = draw(links)
    if family is Family.DATA_PARALLEL:
        replicas = draw(st.integers(1, 8))
        return data_parallel(network, replicas=replicas, link=link, steps=steps, next_forward=next_forward)
    if family is Family.HIERARCHICAL:
        nodes, local = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        return hierarchical(
            network, nodes=nodes, local_ranks=local, link=link, local_link=draw(links), steps=steps,
            next_forward=next_forward,
        )  # fmt: skip
    return pipeline(
        network,
        stages=draw(st.integers(1, len(network.layers))),
        microbatches=draw(st.integers(1, 6)),
        link=link,
        steps=steps,
        next_forward=next_forward,
    )


@st.composite
def schedules(draw, *, whole_seconds: bool = False, one_stream_per_device: bool = False) -> Schedule:
    """Draw any acyclic graph on a few devices and links, in lanes that cannot deadlock."""
    count = draw(st.integers(1, 14))
    durations = st.integers(0, 4).map(float) if whole_seconds else seconds
    resources = [f"resource{i}" for i in range(draw(st.integers(1, 3)))]
    tasks, needs = [], []
    for i in range(count):
        tasks.append(Task(Kind.F, i, draw(durations), draw(st.sampled_from(resources)), demand=draw(demands)))
        needs.append(tuple(draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True))) if i else ())
    buffers = tuple(
        Buffer(draw(sizes), draw(st.sampled_from(resources)), tuple(users))
        for users in draw(
            st.lists(st.lists(st.integers(0, count - 1), min_size=1, max_size=4, unique=True), max_size=5)
        )
    )
    network = Costs(tuple(LayerCost(f"layer{i}", 1, 1, 1) for i in range(count)))
    graph = TaskGraph(Family.SINGLE, tuple(tasks), tuple(needs), buffers, network, Cluster())
    lanes = []
    for resource in resources:
        own = [i for i in range(count) if tasks[i].resource == resource]
        streams = 1 if one_stream_per_device else draw(st.integers(1, 2))
        split: list[list[int]] = [[] for _ in range(streams)]
        for i in own:
            split[draw(st.integers(0, streams - 1))].append(i)
        for number, listed in enumerate(split):
            discipline = draw(st.sampled_from(Discipline))
            if discipline is not Discipline.IN_ORDER:
                listed = draw(st.permutations(listed))
            lanes.append(Lane(f"{resource}.{number}", resource, tuple(listed), discipline))
    return Schedule(graph, tuple(lanes))
