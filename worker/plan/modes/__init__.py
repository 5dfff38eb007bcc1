"""The modes in which a node can run, one module each. Its `propose` returns a candidate plan, or None."""
