"""Triton's interpreter, for processes that do nothing else with Triton."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any


def patch_once() -> None:
    """Have Triton's language exchanged once for each module of kernels, and not at every call.

    The interpreter looks through all of the language whenever a kernel or one of its functions is
    called, which takes half of its time and finds nothing new: what a function exchanges stays so.
    Nor does it look for integers that overflow, which none can in tensors as small as those here.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")
    patch, done = interpreter._patch_lang, {}

    def once(function: Callable[..., Any]) -> Any:
        here = id(function.__globals__)
        if here not in done:
            done[here] = type(patch(function))
        return done[here]()  # of nothing that is to be put back

    interpreter._patch_lang = once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
