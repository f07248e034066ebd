"""Published packages that are read, not imported: they need GPUs to be."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any


def published(package: str, bundle: str = "miles-rl") -> Path | None:
    """Where a distribution that lies apart, miles' by default, has a package."""
    found = (Path(entry) / bundle / package for entry in sys.path if entry)
    return next((path for path in found if path.is_dir()), None)


def module(dotted: str, bundle: str = "miles-rl") -> ast.Module:
    """The syntax of a module of it.

    Raises:
        FileNotFoundError: there is none.
    """
    package, _, rest = dotted.partition(".")
    root = published(package, bundle)
    if root is None:
        raise FileNotFoundError(f"no {package}; run make test-adapters")
    return ast.parse((root / f"{rest.replace('.', '/')}.py").read_text())


def run(tree: ast.Module, given: dict[str, Any], *wanted: str) -> dict[str, Any]:
    """Runs some of a module's definitions as they are, and returns its names.

    Args:
        given: what they look up beside builtins.
    """
    body = [node for node in tree.body if getattr(node, "name", None) in wanted]
    future = ast.parse("from __future__ import annotations").body
    found = dict(given)
    exec(compile(ast.Module([*future, *body], []), "published", "exec"), found)
    return found


def method(tree: ast.AST, owner: str, name: str) -> ast.FunctionDef:
    """A method of one of its classes; the last, if it is written twice."""
    [*_, found] = [
        function
        for klass in ast.walk(tree)
        if isinstance(klass, ast.ClassDef) and klass.name == owner
        for function in klass.body
        if isinstance(function, ast.FunctionDef) and function.name == name
    ]
    return found


def parameters(function: ast.FunctionDef) -> list[tuple[str, bool]]:
    """Names, and whether each has a default."""
    args = function.args
    plain = args.posonlyargs + args.args
    needed = len(plain) - len(args.defaults)
    named = [(arg.arg, i >= needed) for i, arg in enumerate(plain)]
    return named + [
        (arg.arg, default is not None)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]


def names(tree: ast.AST) -> set[str]:
    """All that is called or looked up by name."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return found | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def defaults(tree: ast.AST, owner: str) -> dict[str, Any]:
    """The fields of one of its dataclasses that have plain defaults, with these."""
    return {
        field.target.id: field.value.value
        for klass in ast.walk(tree)
        if isinstance(klass, ast.ClassDef) and klass.name == owner
        for field in klass.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(field.value, ast.Constant)
    }


def remote_calls(function: ast.FunctionDef) -> list[str]:
    """The methods of Ray actors that it calls, in order."""
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and node.attr == "remote"
        and isinstance(node.value, ast.Attribute)
    ]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    return [node.value.attr for node in calls if isinstance(node.value, ast.Attribute)]


class _WithoutPackages(ast.NodeTransformer):
    """Leaves out imports of packages; what they would bring is given."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        return ast.Pass() if (node.module or "").split(".")[0] in self._packages else node

    def visit_Import(self, node: ast.Import) -> ast.AST:
        return ast.Pass() if node.names[0].name.split(".")[0] in self._packages else node


def whole(
    dotted: str, given: dict[str, Any], bundle: str = "", left_out: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Runs a module as it is but for imports of its own package and some others, and returns its
    names. Each call makes new ones.

    Args:
        given: what it would import from there.
    """
    packages = (dotted.partition(".")[0], *left_out)
    tree = ast.fix_missing_locations(_WithoutPackages(packages).visit(module(dotted, bundle)))
    future = ast.parse("from __future__ import annotations").body
    found = dict(given, __name__=dotted)
    # Dataclasses and named tuples look their module up.
    sys.modules.setdefault(dotted, type(sys)(dotted))
    exec(compile(ast.Module([*future, *tree.body], []), dotted, "exec"), found)
    return found
