"""A simulator that looks at every lane in every tick: slow, and simple enough to be believed.

It needs whole-number costs, and devices with one stream each.
"""

from gradweave.schedule import Discipline, Schedule


def simulate_by_ticks(schedule: Schedule) -> dict[int, tuple[int, int]]:
    """Return the start and end tick of every task; raise RuntimeError on deadlock."""
    tasks = schedule.graph.tasks
    needs = {i: set(needs) for i, needs in enumerate(schedule.graph.needs)}
    for task, earlier in schedule.waits:
        needs[task].add(earlier)
    left = {i: round(task.seconds) for i, task in enumerate(tasks)}
    started: dict[int, int] = {}
    ended: dict[int, int] = {}
    ready_at: dict[int, int] = {}
    running = {lane.name: None for lane in schedule.lanes}
    now = 0
    while len(ended) < len(tasks):
        progress = True
        while progress:
            progress = False
            for i in needs:
                if i not in ready_at and needs[i] <= ended.keys():
                    ready_at[i] = now
            for lane in schedule.lanes:
                chosen = _choose(lane, running[lane.name], ready_at, ended)
                if chosen is None:
                    continue
                running[lane.name] = chosen
                started.setdefault(chosen, now)
            for lane in schedule.lanes:
                task = running[lane.name]
                if task is not None and left[task] == 0:
                    ended[task] = now
                    running[lane.name] = None
                    progress = True
        if len(ended) == len(tasks):
            break
        if all(task is None for task in running.values()):
            raise RuntimeError("deadlock")
        for task in running.values():
            if task is not None:
                left[task] -= 1
        now += 1
        for lane in schedule.lanes:
            task = running[lane.name]
            if task is not None and left[task] == 0:
                ended[task] = now
                running[lane.name] = None
    return {i: (started[i], ended[i]) for i in ended}


def _choose(lane, current, ready_at, ended):
    waiting = [task for task in lane.tasks if task not in ended]
    ready = [task for task in waiting if task in ready_at]
    if current is not None and lane.discipline is not Discipline.PREEMPTIVE:
        return current
    if lane.discipline is Discipline.IN_ORDER:
        return waiting[0] if waiting and waiting[0] in ready_at else None
    if lane.discipline is Discipline.FIFO:
        return min(ready, key=lambda task: (ready_at[task], lane.tasks.index(task)), default=None)
    return ready[0] if ready else None
