"""A node's part of a deployment: the plan from the master, its checks, and where each weight lies in memory."""
