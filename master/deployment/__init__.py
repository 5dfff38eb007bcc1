"""Who holds what: plans, and deployments made of them."""
