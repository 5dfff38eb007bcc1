"""The modes in which a node can run. A mode proposes a plan here, and is opened under the same name at run time."""
