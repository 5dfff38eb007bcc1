"""The split of a model over the nodes of a home: the fewest seconds per token within each node's memory."""
