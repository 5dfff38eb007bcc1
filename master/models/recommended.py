"""The recommended models: a table in the package, with what the planner needs to know of each."""

import json
from dataclasses import dataclass
from importlib.resources import files

from master.planning.shapes import ModelShape, shape_of_config
from tpi.families.base import Fields


@dataclass(frozen=True)
class Recommended:
    """A model of the Hugging Face hub that TPI runs.

    Attributes:
        name: the name for `-m` and `tpi pull`.
        parameters: the number of parameters, in billions.
        good: a few words on what the model is good for.
        config: the fields of its config.json that differ from the defaults of its family.
        dtype: the format of its weights, as for `--dtype`.
    """

    name: str
    parameters: float
    good: str
    config: Fields
    dtype: str = "q4"

    def shape(self) -> ModelShape:
        """Return the shapes of the model's blocks.

        Raises:
            ModelError: if the model's family is not supported.
        """
        return shape_of_config(self.name, self.config, self.dtype)


def recommended() -> list[Recommended]:
    """Return the recommended models, the smallest first."""
    entries = json.loads(files("master.models").joinpath("recommended.json").read_text())
    return sorted((Recommended(**entry) for entry in entries), key=lambda each: each.parameters)
