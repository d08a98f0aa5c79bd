# ruff: noqa: SIM905
"""What a repair has no business with: names through which code reaches into the interpreter or the tests that judge it.

Code under test shares an interpreter with its tests, so no barrier inside that interpreter is complete. This rule reads
the submission instead. It counts names in the syntax tree, and refuses those that neither the original nor the task's
reference fix uses as often, so that honest repairs of code that needs such names pass.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator

MODULES = frozenset(
    """
    __main__ _ctypes _testcapi _testinternalcapi _thread atexit bdb builtins cProfile code codeop ctypes doctest
    faulthandler gc importlib inspect marshal pdb pickle pkgutil profile pydoc runpy signal site sysconfig test timeit
    trace traceback tracemalloc unittest zipimport
    """.split()
)
NAMES = frozenset(
    """
    __bases__ __base__ __builtins__ __class__ __closure__ __code__ __defaults__ __dict__ __func__ __getattribute__
    __globals__ __import__ __loader__ __mro__ __path__ __self__ __spec__ __subclasses__ __traceback__ __wrapped__
    __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __contains__ __hash__ __bool__ __sub__ __rsub__ __abs__ __round__
    __getattr__ __setattr__ __prepare__ __instancecheck__ __subclasscheck__
    _current_frames _exit _getframe _getframemodulename abort attrgetter breakpoint compile cr_frame eval exec
    excepthook exc_info execv execve f_back f_builtins f_globals f_locals fork forkpty get_stack get_type_hints gi_frame
    globals kill locals make_dataclass metaclass methodcaller modules monitoring new_class setattr setprofile settrace tb_frame unittest unraisablehook vars
    walk_stack walk_tb CodeType ForwardRef FunctionType TestCase TestResult addaudithook meta_path path_hooks
    path_importer_cache
    """.split()
)


def new_reach(text: str, allowed: Iterable[str], protected: Iterable[str] = ()) -> str | None:
    """The first name that ``text`` (a module's source) uses more often than every source of ``allowed``, or None.

    ``protected`` are paths of test files: importing one of them is reach too. Source that does not parse here cannot run
    in the sandbox either, and reaches nothing.
    """
    tests = frozenset(".".join(_module(path)) for path in protected)
    try:
        found = Counter(_names(ast.parse(text.encode()), tests))
    except (SyntaxError, ValueError):
        return None
    except (RecursionError, MemoryError):
        return "nesting without end"
    for source in allowed if found else ():
        try:
            found -= Counter(_names(ast.parse(source.encode()), tests))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return min(found, default=None)


def _module(path: str) -> list[str]:
    parts = path.removesuffix(".py").split("/")
    return parts[:-1] if parts[-1] == "__init__" else parts


def _names(tree: ast.Module, tests: frozenset[str]) -> Iterator[str]:
    imported: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                imported |= {n.asname or n.name.split(".")[0] for n in names}
                for n in names:
                    if n.name.split(".")[0] in MODULES or n.name == "logging.config" or _tested(n.name, tests, 0):
                        yield f"import of {n.name}"
            case ast.ImportFrom(names=names):
                imported |= {n.asname or n.name for n in names}
                yield from _from(node, tests)
            case (
                ast.Name(id=name)
                | ast.Attribute(attr=name)
                | ast.Constant(value=str(name))
                | ast.keyword(arg=str(name))
            ):
                if name in NAMES:
                    yield name
            case ast.MatchClass(kwd_attrs=names):
                yield from (name for name in names if name in NAMES)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                if name in NAMES:
                    yield name
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(), *_]):
                pass
            case ast.Call(func=ast.Name(id="getattr")):
                yield "getattr of a computed name"
            case ast.Call(func=ast.Name(id="type"), args=[_, _, *_]):
                yield "type() with bases"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attr, ctx=ast.Store() | ast.Del()) if name in imported:
                yield f"assignment to {name}.{attr}"


def _from(node: ast.ImportFrom, tests: frozenset[str]) -> Iterator[str]:
    module = node.module or ""
    if node.level == 0 and (module.split(".")[0] in MODULES or module == "logging.config"):
        yield f"import from {module}"
    for name in (n.name for n in node.names):
        if name in NAMES or (name == "*" and not node.level):
            yield f"import of {name} from {module}"
        elif _tested(f"{module}.{name}".strip("."), tests, node.level) or _tested(module, tests, node.level):
            yield f"import of {name} from the tests"


def _tested(module: str, tests: frozenset[str], level: int) -> bool:
    """Whether a module is one of the tests; of a relative import only the end of the name is known."""
    return module in tests or (
        level > 0 and module != "" and any(t.endswith(f".{module}") or t == module for t in tests)
    )
