"""The shape of the code: imports point downwards, policy runs without torch, the tail stays short."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dspark

PACKAGE = Path(dspark.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
# A room may import the rooms left of it; the nouns at the package's top belong to everyone.
ROOMS = ("models", "speculation", "engine", "serving")
ALLOWED = {room: set(ROOMS[: i + 1]) for i, room in enumerate(ROOMS)} | {
    "evaluation": {"models", "speculation", "engine", "evaluation"},
    "training": {"models", "speculation", "training"},
    "": set(),
}
WITHOUT_TORCH = (
    "engine.scheduler",
    "engine.pace",
    "engine.detokenizer",
    "engine.page_allocator",
    "engine.output",
    "config",
    "request",
    "metrics",
    "cli",
    "training.config",
    "speculation.calibration",
    "speculation.online_calibration",
    "speculation.capacity",
    "speculation.planner",
    "speculation.prefix_scheduler",
    "speculation.combined",
    "speculation.match_rates",
    "speculation.ngram",
    "speculation.position_rates",
    "speculation.proposal",
)
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def imported_rooms(tree: ast.Module) -> set[str]:
    """Return the rooms imported at a module's top level, type-checking blocks excluded."""
    names = [n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom)]
    names += [alias.name for n in tree.body if isinstance(n, ast.Import) for alias in n.names]
    rooms = {name.split(".")[1] for name in names if name.startswith("dspark.") and "." in name}
    return rooms & set(ALLOWED)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    assert imported_rooms(ast.parse(path.read_text())) <= ALLOWED[room_of(path)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno - f.lineno >= MAX_FUNCTION_LINES}
    assert not long


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_module_says_what_it_holds(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring
    assert len(docstring.splitlines()) <= 6


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_policy_runs_without_torch(module):
    code = f"import dspark.{module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
