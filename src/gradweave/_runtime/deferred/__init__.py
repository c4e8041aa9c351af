"""Deferred work: stand-ins for parameters and gradients with a value that is not there yet.

There are four kinds, one class each, recognised by type:

* :class:`~gradweave._runtime.deferred.forbidden.ForbiddenGradient`: gone; every use raises.
* :class:`~gradweave._runtime.deferred.late.LateGradient`: still being computed; another object until it is.
* :class:`~gradweave._runtime.deferred.pending_gradient.PendingGradient`: the gradient itself, to be waited for.
* :class:`~gradweave._runtime.deferred.pending_parameter.PendingParameter`: the parameter itself, to be updated first.

The first two have no data (torch's wrapper subclasses) and see every operation, also from C++. The last two are the
real objects, with their memory, of a class that is swapped for as long as they are pending: they only see what is
called from Python.
"""
