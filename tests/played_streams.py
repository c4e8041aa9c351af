"""CUDA's streams and events, played on the CPU: operations run at once, and it is noted what nothing has put in order.

Two operations are in order if they are on one stream, or if the later one's stream has waited for an event behind the
earlier one. Two that touch the same memory, of which one writes, and that are in no order are a race: on a GPU the
result would depend on which of them is faster. So are a use of memory and what is made in its place: what has been
freed goes to the stream that it was made on, at once.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradweave._runtime.deferred.pending_updates import PendingUpdates


class Event:
    """A point in the work of a stream, and all that this had waited for."""

    def __init__(self, **_):
        self.passed = {}

    def record(self, stream=None):
        self.passed = dict((stream or torch.cuda.current_stream()).passed)


class Stream:
    """A queue of work.

    Attributes:
        passed: How much work of each stream comes before what is given to this one next.
    """

    def __init__(self, device=None, **_):
        self.device = torch.device(device or "cuda")
        self.passed = {self: 0}

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event):
        for stream, count in event.passed.items():
            self.passed[stream] = max(count, self.passed.get(stream, 0))

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Races(TorchDispatchMode):
    """Notes races; while it is on, ``torch.cuda`` hands out streams of this module.

    Attributes:
        found: What raced: the two operations.
        streams: How much work each stream was given, the main one first.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.found = []
        self.main = self.current = Stream()
        self.streams = {self.main: 0}
        self._touched = {}
        self._made = []
        monkeypatch.setattr(torch.cuda, "Stream", self._new_stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self._keep(tensor))
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: id(self.current), raising=False)

    def _new_stream(self, device=None, **_):
        made = Stream(device)
        self.streams[made] = 0
        return made

    @contextmanager
    def _on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _keep(self, tensor):
        """Sees to it that memory is not used again before streams are through with it: not at all."""
        kept = tensor.untyped_storage()._cdata
        self._made = [(on, memory) for on, memory in self._made if memory.cdata != kept]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():  # they were asked before, if it was Python that called
            made = func(*args, **(kwargs or {}))
        schema, kwargs = func._schema, kwargs or {}
        if any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns):
            return made  # a view, which touches nothing
        named = dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
        writes = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        written = _places([named[name] for name in writes if name in named])
        given = _places(named)
        self._work(str(func), given - written, written, _places(made) - given)
        with torch._C.DisableTorchFunctionSubclass():
            for x in filter(_has_memory, tree_leaves(made)):
                if x.untyped_storage()._cdata not in given:
                    self._made.append((self.current, StorageWeakRef(x.untyped_storage())))
        return made

    def _work(self, name, read, written, made):
        """An operation on the current stream; what it has made has no history, wherever it lies."""
        stream = self.current
        self.streams[stream] += 1
        stream.passed[stream] += 1
        here = (stream, stream.passed[stream], name)
        if made:
            self._use_again(stream, name)
        for place in read | written:
            last_write, reads = self._touched.setdefault(place, (None, []))
            self._check(stream, name, [last_write, *(reads if place in written else ())])
            self._touched[place] = (here, []) if place in written else (last_write, [*reads, here])
        self._touched |= {place: (here, []) for place in made}

    def _use_again(self, stream, name):
        """Memory that has been freed may be that of what a stream makes now."""
        for made in [(on, memory) for on, memory in self._made if on is stream and memory.expired()]:
            self._made.remove(made)
            last_write, reads = self._touched.pop(made[1].cdata, (None, []))
            self._check(stream, f"memory used again by {name}", [last_write, *reads])

    def _check(self, stream, name, earlier):
        """Notes what of earlier work may not be over when a stream comes to this."""
        for other, number, what in filter(None, earlier):
            if stream.passed.get(other, 0) < number:
                self.found.append((what, name))


def _places(values):
    """Where the memory of tensors is; stand-ins for others have none, and are not asked for it."""
    with torch._C.DisableTorchFunctionSubclass():
        return {x.untyped_storage()._cdata for x in filter(_has_memory, tree_leaves(values))}


def _has_memory(value):
    return isinstance(value, nn.Parameter) or type(value) is torch.Tensor


def put_updates_on_a_gpu(monkeypatch):
    """Has forward-fusion launch updates as it does on a GPU, also where it is seen, and lets them be seen."""
    monkeypatch.setattr("gradweave._runtime.deferred.deferred_updates._is_watched", lambda: False)
    monkeypatch.setattr("gradweave._runtime.deferred.pending_updates.without_dispatch_modes", nullcontext)
    run_as_if_on_a_gpu(monkeypatch, PendingUpdates, "_launch", "_make_one_visible")


def run_as_if_on_a_gpu(monkeypatch, cls, *methods):
    """Has methods find parameters there."""

    def on_a_gpu(method):
        def run(*args, **options):
            with as_if_on_a_gpu():
                return method(*args, **options)

        return run

    for name in methods:
        monkeypatch.setattr(cls, name, on_a_gpu(getattr(cls, name)))


@contextmanager
def as_if_on_a_gpu():
    """Context in which parameters say that they are on a GPU; their memory stays where it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Parameter, "device", property(lambda _: torch.device("cuda")), raising=False)
        patch.setattr(nn.Parameter, "is_cuda", True, raising=False)
        yield
