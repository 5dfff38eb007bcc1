"""Paths of the repository and of the tests' data files."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
