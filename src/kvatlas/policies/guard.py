"""The guard of a policy's methods, which are the code of its author: an error becomes one sentence."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from functools import wraps
from typing import Any

from kvatlas.core import KvatlasError, canonical, described
from kvatlas.machine import out_of_memory
from kvatlas.policies.parameter_types import shortened

#: The methods that the author of a policy may write.
AUTHORED = ("__post_init__", "bind", "check", "check_prompt", "identity", "observe", "slots_used", "score")
#: What to do in place of an assignment to an attribute of a policy.
_STATELESS = "a policy keeps no state of its own: notes on tokens go in `columns`, derived values in cached properties"

#: What stands in a step for signals that a policy does not declare.
_UNOBSERVED = "step.attention is None without Signal.ATTENTION in observes, and step.hidden without Signal.HIDDEN"


def guard_methods(policy: type) -> None:
    """Guard the methods that a class of policies defines itself."""
    for name in AUTHORED:
        method = vars(policy).get(name)
        if callable(method):
            setattr(policy, name, _with_sentences(method))


def _with_sentences(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method whose errors, and results with which nothing can be done, are one KvatlasError each."""
    name = method.__name__

    @wraps(method)
    def call(policy: Any, *values: Any, **named: Any) -> Any:
        try:
            result = method(policy, *values, **named)
        except (KvatlasError, KeyboardInterrupt):
            raise
        except BaseException as error:
            # The engine halves its batch when memory runs out.
            if out_of_memory(error):
                raise
            way_out = f"; {_STATELESS}" if isinstance(error, FrozenInstanceError) else ""
            if name == "observe" and "NoneType" in str(error):
                way_out = f"; {_UNOBSERVED}"
            if "does not require grad" in described(error):
                way_out = "; gradients are computed within torch.enable_grad() alone"
            sentence = f"The policy {policy.setting_name!r} failed in {name} ({described(error)}){way_out}."
            raise KvatlasError(sentence) from error

        expected = ""
        if name == "bind" and not isinstance(result, type(policy)):
            expected = f"an object of {type(policy).__name__}"
        if name in ("observe", "check", "check_prompt") and result is not None:
            expected = "nothing: notes go in columns, as by step.enter, and a fault is raised as kvatlas.KvatlasError"
        if name == "identity":
            try:
                canonical(result)
                is_whole = {"name", "version"} <= result.keys()
            except (AttributeError, TypeError, ValueError, RecursionError):
                is_whole = False
            if not is_whole:
                expected = "a dictionary of numbers and texts with the entries of super().identity(model)"
        if expected:
            given = f"returned {shortened(result)} from {name}; expected {expected}"
            raise KvatlasError(f"The policy {policy.setting_name!r} {given}.")
        return result

    return call
