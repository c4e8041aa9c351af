"""Deferred work: stand-ins for parameters and gradients whose values are not computed yet.

There are four kinds, one class each, recognised by type:

* :class:`~gradweave._runtime.deferred.forbidden.ForbiddenGradient`: the gradient has been freed; every use raises.
* :class:`~gradweave._runtime.deferred.late.LateGradient`: the gradient is still being computed; another object stands
  in for it.
* :class:`~gradweave._runtime.deferred.pending_gradient.PendingGradient`: the gradient itself, to be waited for.
* :class:`~gradweave._runtime.deferred.pending_parameter.PendingParameter`: the parameter itself, to be updated first.

The first two have no data (torch's wrapper subclasses) and see every operation, also from C++. The last two are the
real objects, with their memory, whose class is swapped while they are pending: they see only what is called from
Python.
"""
