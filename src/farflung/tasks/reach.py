"""What a repair has no business with: names through which code reaches into the interpreter or the tests that judge it.

Code under test shares an interpreter with its tests, so no barrier inside that interpreter is complete. This rule reads
the submission instead. It counts names in the syntax tree, and refuses those that neither the original nor the task's
reference fix uses as often, so that honest repairs of code that needs such names pass.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

MODULES = frozenset(
    [
        "__main__",
        "_ctypes",
        "_thread",
        "atexit",
        "bdb",
        "builtins",
        "code",
        "codeop",
        "ctypes",
        "faulthandler",
        "gc",
        "importlib",
        "inspect",
        "marshal",
        "pdb",
        "pickle",
        "pkgutil",
        "runpy",
        "signal",
        "site",
        "sysconfig",
        "trace",
        "tracemalloc",
        "unittest",
        "zipimport",
    ]
)
NAMES = frozenset(
    [
        "__bases__",
        "__base__",
        "__builtins__",
        "__class__",
        "__closure__",
        "__code__",
        "__defaults__",
        "__dict__",
        "__func__",
        "__getattribute__",
        "__globals__",
        "__import__",
        "__loader__",
        "__mro__",
        "__self__",
        "__spec__",
        "__subclasses__",
        "__traceback__",
        "__wrapped__",
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__contains__",
        "__hash__",
        "__instancecheck__",
        "__subclasscheck__",
        "_current_frames",
        "_exit",
        "_getframe",
        "_getframemodulename",
        "abort",
        "attrgetter",
        "breakpoint",
        "compile",
        "cr_frame",
        "eval",
        "exec",
        "excepthook",
        "exc_info",
        "execv",
        "execve",
        "f_back",
        "f_builtins",
        "f_globals",
        "f_locals",
        "fork",
        "forkpty",
        "get_stack",
        "gi_frame",
        "globals",
        "kill",
        "locals",
        "methodcaller",
        "modules",
        "monitoring",
        "setattr",
        "setprofile",
        "settrace",
        "tb_frame",
        "unraisablehook",
        "vars",
        "walk_stack",
        "walk_tb",
        "CodeType",
        "FunctionType",
        "TestCase",
        "TestResult",
        "meta_path",
        "path_hooks",
        "addaudithook",
    ]
)


def new_reach(text: str, *allowed: str) -> str | None:
    """The first name that ``text`` (a module's source) uses more often than every source of ``allowed``, or None.

    Source that does not parse here cannot run in the sandbox either, and reaches nothing.
    """
    try:
        found = Counter(_names(ast.parse(text.encode())))
    except (SyntaxError, ValueError):
        return None
    except (RecursionError, MemoryError):
        return "nesting without end"
    if not found:
        return None
    for source in allowed:
        try:
            found -= Counter(_names(ast.parse(source.encode())))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return min(found, default=None)


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (n.name for n in names if n.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=module, names=names, level=0):
                if (module or "").split(".")[0] in MODULES or any(n.name == "*" for n in names):
                    yield f"from {module}"
                yield from (n.name for n in names if n.name in NAMES)
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                if name in NAMES:
                    yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                if name in NAMES:
                    yield name
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(), *_]):
                pass
            case ast.Call(func=ast.Name(id="getattr")):
                yield "getattr of a computed name"
            case ast.Call(func=ast.Name(id="type"), args=[_, _, *_]):
                yield "type() with bases"
